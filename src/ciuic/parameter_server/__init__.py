"""The asynchronous parameter server as an API: the ledger with its `async` policy, behind four coroutines."""

from ciuic.parameter_server.arrays import Delta
from ciuic.parameter_server.server import AsyncParameterServer

__all__ = ["AsyncParameterServer", "Delta"]

"""Ciuic trains one PyTorch model on machines scattered over slow, unreliable links.

    import ciuic

    run = ciuic.join()                                        # in a worker that ciuic started
    model, optimizer, loader = run.prepare(model, optimizer, loader)

`join` and `Run` load torch when they are first used; `import ciuic` alone does not, nor do `AsyncParameterServer` and
`CiuicNodeNetwork`.
"""

from typing import TYPE_CHECKING

from ciuic.errors import (
    AccessError,
    CiuicError,
    JobFileError,
    ProtocolError,
    RunFailedError,
    StorageError,
    UnreachableError,
    UsageError,
)

if TYPE_CHECKING:
    from ciuic.network import CiuicNodeNetwork
    from ciuic.parameter_server import AsyncParameterServer
    from ciuic.train.joining import join
    from ciuic.train.session import Run

__version__ = "0.1.0"

__all__ = [
    "AccessError",
    "AsyncParameterServer",
    "CiuicError",
    "CiuicNodeNetwork",
    "JobFileError",
    "ProtocolError",
    "Run",
    "RunFailedError",
    "StorageError",
    "UnreachableError",
    "UsageError",
    "__version__",
    "join",
]

_LAZY = {
    "AsyncParameterServer": "ciuic.parameter_server",
    "CiuicNodeNetwork": "ciuic.network",
    "Run": "ciuic.train.session",
    "join": "ciuic.train.joining",
}


def __getattr__(name: str) -> object:
    """Load other rooms on first use (PEP 562); by name, so that the rooms below do not depend on torch here."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

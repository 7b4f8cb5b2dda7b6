"""Ciuic trains one PyTorch model on machines scattered over slow, unreliable links.

    import ciuic

    run = ciuic.join()                                        # in a worker that ciuic started
    model, optimizer, loader = run.prepare(model, optimizer, loader)

`join` and `Run` load torch when they are first used; `import ciuic` alone does not.
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
    from ciuic.train.session import Run, join

__version__ = "0.1.0"

__all__ = [
    "AccessError",
    "CiuicError",
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

_FROM_SESSION = ("Run", "join")


def __getattr__(name: str) -> object:
    """Load the training side on first use (PEP 562); by name, so that the rooms below do not depend on torch here."""
    if name in _FROM_SESSION:
        from importlib import import_module

        return getattr(import_module("ciuic.train.session"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

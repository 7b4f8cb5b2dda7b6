"""The run this process trains in, for what follows it without being told: a learning-rate schedule, for one.

Held weakly: when the program drops its run, there is none.
"""

import weakref
from typing import Protocol, runtime_checkable


@runtime_checkable
class HasProgress(Protocol):
    """What a schedule needs of a run (`ciuic.train.session.Run` has it)."""

    @property
    def progress(self) -> float:
        """0..1, of the whole run over all nodes."""


class _Place:
    """One slot per process; `run.prepare` fills it."""

    run: "weakref.ref[HasProgress] | None" = None


_PLACE = _Place()


def set_current_run(run: HasProgress | None) -> None:
    """From now on `current_run()` is this run (None: no run)."""
    _PLACE.run = None if run is None else weakref.ref(run)


def current_run() -> HasProgress | None:
    """The run that was prepared in this process and still exists, or None."""
    return None if _PLACE.run is None else _PLACE.run()

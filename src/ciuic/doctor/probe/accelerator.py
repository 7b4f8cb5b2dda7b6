"""`ciuic.doctor.watch_accelerator`: the doctor in a loop of Accelerate. Accelerate itself is not imported."""

from pathlib import Path
from typing import Any

from ciuic.doctor.finding import Incident
from ciuic.doctor.probe.watching import Watch, watch
from ciuic.errors import UsageError


class _AtTheEnd:
    """What an Accelerator asks of a tracker: `end_training` closes the watch."""

    name = "ciuic-doctor"
    main_process_only = False
    requires_logging_directory = False

    def __init__(self, watch: Watch) -> None:
        self.tracker = watch
        self.incidents: list[Incident] = []

    def start(self) -> None:
        """`init_trackers`; it has begun already."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The doctor keeps no configuration."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """The doctor looks by itself."""

    def finish(self) -> None:
        """`end_training`."""
        self.incidents = self.tracker.close()


def watch_accelerator(
    accelerator: Any,
    model: Any = None,
    optimizer: Any = None,
    *,
    folder: str | Path = "",
    every: int = 0,
) -> Watch:
    """Look into this training run from now on: call it on every process, best right after `Accelerator()`.

    `model` and `optimizer`: those that `prepare` gave, when it is called later. `accelerator.end_training()` closes it;
    so does `close()` of what is returned, or the end of the program. Raises UsageError when the first argument is no
    Accelerator, and what `watch` raises.
    """
    if not hasattr(accelerator, "prepare") or not hasattr(accelerator, "trackers"):
        raise UsageError(
            f"{type(accelerator).__name__} is not an Accelerator",
            next="watch_accelerator(accelerator) after it is made",
        )
    watched = watch(model, optimizer, folder=folder, every=every)
    accelerator.trackers.append(_AtTheEnd(watched))
    return watched

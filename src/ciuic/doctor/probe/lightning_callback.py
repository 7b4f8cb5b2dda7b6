"""`ciuic.doctor.LightningCallback`: the doctor in a Trainer of Lightning."""

import importlib
import sys
from pathlib import Path
from typing import Any

from ciuic.doctor.finding import Incident
from ciuic.doctor.probe.watching import Watch, watch
from ciuic.errors import UsageError

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""One library under two names, whose classes are not the same."""


def _callback_class() -> Any:
    """That of the package that the program has imported, else of the one that is installed. Raises UsageError."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError:
            continue
    raise UsageError("Lightning is not installed", next="pip install lightning")


class LightningCallback(_callback_class()):
    """`Trainer(..., callbacks=[LightningCallback()])`: look into the training until `fit` returns.

    It begins before the model is wrapped. `folder` and `every` as for `watch`. Under `ciuic doctor run` it changes
    nothing.
    """

    def __init__(self, *, folder: str | Path = "", every: int = 0) -> None:
        super().__init__()
        self._folder, self._every = folder, every
        self._watch: Watch | None = None
        self.incidents: list[Incident] = []
        """After `fit`, on rank 0: what was found, the likeliest first."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The ranks have met; the model is not wrapped yet."""
        if stage == "fit" and self._watch is None:
            self._watch = watch(folder=self._folder, every=self._every)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """`fit` is about to return."""
        if stage == "fit" and self._watch is not None:
            self.incidents = self._watch.close()
            self._watch = None

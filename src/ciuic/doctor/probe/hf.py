"""`ciuic.doctor.HfCallback`: the doctor in a Trainer of Hugging Face."""

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ciuic.doctor.finding import Incident
from ciuic.doctor.probe.discover import wrapper_of
from ciuic.doctor.probe.probe import ranks_here
from ciuic.doctor.probe.watching import Watch, watch


class HfCallback(TrainerCallback):
    """`Trainer(..., callbacks=[HfCallback()])`: look into the training until `train` returns.

    It begins when the Trainer is built, so that it sees how the model is wrapped; added later, it begins with `train`.
    `folder` and `every` as for `watch`. Under `ciuic doctor run` it changes nothing.
    """

    def __init__(self, *, folder: str | Path = "", every: int = 0) -> None:
        self._folder, self._every = folder, every
        self._watch: Watch | None = None
        self.incidents: list[Incident] = []
        """After `train`, on rank 0: what was found, the likeliest first."""

    def on_init_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The Trainer is built; torch.distributed is in use when there are several ranks."""
        if ranks_here()[1] == int(os.environ.get("WORLD_SIZE") or 1):
            self._begin()

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The model is wrapped."""
        self._begin(parts.get("model"))

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The last step was made."""
        if self._watch is not None:
            self.incidents = self._watch.close()
            self._watch = None

    def _begin(self, model: Any = None) -> None:
        if self._watch is None:
            wrapped = model if model is None else wrapper_of(model)
            self._watch = watch(wrapped, folder=self._folder, every=self._every)

"""How far a run had come when its checkpoint was written."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

STEP_KEYS = (
    "step",
    "steps",
    "global_step",
    "iteration",
    "iter",
    "it",
    "num_steps",
    "iter_num",
    "optimizer_step",
    "current_step",
)
EPOCH_KEYS = ("epoch", "epochs", "current_epoch", "epoch_num", "start_epoch")
STATES_MAX = 8


def counter(what: Any, keys: tuple[str, ...]) -> int:
    """The first of these keys of a mapping that holds a whole number, or -1."""
    for key in keys if isinstance(what, Mapping) else ():
        value = what.get(key)
        if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) and value >= 0:
            return int(value)
    return -1


def steps_of(optimizer: Optimizer) -> int:
    """Steps that its state counts, or -1."""
    found = -1
    for _, state in zip(range(STATES_MAX), optimizer.state.values(), strict=False):
        if isinstance(state, Mapping):
            found = max(found, counter(state, ("step",)))
    return found


class Progress:
    """Hears of what is read and loaded before the first step."""

    def __init__(self) -> None:
        self.steps = -1
        """Of the optimizer; -1: no training state was loaded."""
        self.epoch = -1
        """As the file says, or -1."""
        self._file_steps = -1

    def read(self, what: Any) -> None:
        """A file."""
        steps, epoch = counter(what, STEP_KEYS), counter(what, EPOCH_KEYS)
        self._file_steps = steps if steps >= 0 else self._file_steps
        self.epoch = epoch if epoch >= 0 else self.epoch

    def loaded(self, target: Any) -> None:
        """Something has taken a state: training goes on, it does not begin."""
        if isinstance(target, Optimizer) and target.state:
            self.steps = max(self.steps, steps_of(target), self._file_steps)
        elif isinstance(target, LRScheduler) and target.last_epoch > 0:
            self.steps = max(self.steps, self._file_steps)

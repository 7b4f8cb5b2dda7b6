"""Optimizers that use gradients as a scaled loss has left them."""

from typing import Any

from torch.optim import Optimizer

from ciuic.doctor.probe.part import Step
from ciuic.doctor.probe.probe import Probe

Mark = tuple[int, int]
"""Which gradient tensor it is, and how often it was written to."""
_NONE: tuple[Mark | None, Any] = (None, None)


class ScaledSteps:
    """Follows one gradient of each optimizer through backward passes; nothing before the first scaled loss."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._scaler: Any = None
        """Of the loss whose backward pass comes next or runs; None: not scaled. What its scale is, is asked only when
        there is something to tell: a device would have to be waited for."""
        self._is_on = False
        self._begun: dict[int, Mark | None] = {}
        self._left: dict[int, tuple[Mark, Any]] = {}
        """By optimizer: the gradient after a scaled pass that wrote to it, and the scaler."""
        self._mixed: set[int] = set()
        """Optimizers whose gradients hold those of a loss that was not scaled as well."""
        self._counts: dict[int, int] = {}

    def scaled(self, scaler: Any) -> None:
        """A loss was scaled."""
        self._is_on = self._is_on or scaler.is_enabled()
        self._scaler = scaler if scaler.is_enabled() else None

    def unscaled(self, optimizer: Optimizer) -> None:
        """The scaler has divided its gradients: torch does not count that as writing."""
        for index, known in enumerate(self._probe.optimizers):
            if known is optimizer:
                self._left.pop(index, None)

    def begins(self) -> None:
        """A backward pass."""
        if self._is_on:
            self._begun = {index: _mark(optimizer) for index, optimizer in enumerate(self._probe.optimizers)}

    def ends(self) -> None:
        """It has written, or not."""
        if not self._is_on:
            return
        scaler, self._scaler = self._scaler, None
        for index, optimizer in enumerate(self._probe.optimizers):
            mark = _mark(optimizer)
            if mark is None or mark == self._begun.get(index):
                continue
            if scaler is None:
                self._mixed.add(index)
            else:
                self._left[index] = mark, scaler

    def used(self, step: Step) -> list[float] | None:
        """The optimizer gets its gradients: SCALED_STEP when they are those of a scaled loss and nothing else."""
        mark, scaler = self._left.pop(step.index, _NONE)
        is_mixed = step.index in self._mixed
        self._mixed.discard(step.index)
        is_bare = step.scaler is None and not step.closure and not is_mixed and step.index not in self._probe.tools
        if mark is None or not is_bare or mark != _mark(step.optimizer):
            return None
        self._counts[step.index] = self._counts.get(step.index, 0) + 1
        if not step.due:
            return None
        scale = float(scaler.get_scale())
        return [self._counts[step.index], scale] if scale != 1.0 else None


def _mark(optimizer: Optimizer) -> Mark | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return id(parameter.grad), parameter.grad._version
    return None

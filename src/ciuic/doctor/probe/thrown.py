"""Backward passes whose gradients are cleared before anybody has used them."""

import sys
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ciuic.doctor.facts_model import THROWN
from ciuic.doctor.probe import stack
from ciuic.doctor.probe.named import own_parameters
from ciuic.doctor.probe.part import Call, Part, Step

WATCHED = 2
"""Parameters of each optimizer that are looked at."""
DEPTH_MAX = 40
Seen = dict[int, tuple[int, int, int]]
"""By parameter: which gradient tensor it has, how often that was written to, and how often the parameter was."""


class Thrown(Part):
    """THROWN of sampled steps, from the passes since the step before."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._is_close = True
        self._fresh: dict[int, tuple[Seen, int]] = {}
        """By optimizer: gradients of the last pass that nobody has used, and the program's lines that led to it."""
        self._gone: dict[int, list[tuple[int, str]]] = {}
        self._is_exchanged = False

    def backward_end(self, roots: tuple[Tensor, ...]) -> None:
        """Whose gradients has it written to?"""
        if not self._is_close:
            return
        self._is_exchanged = False
        lines = 0
        for index, optimizer in enumerate(self.probe.optimizers):
            seen = _seen(optimizer)
            if seen and seen != self._fresh.get(index, ({}, 0))[0]:
                lines = lines or _lines()
                self._fresh[index] = seen, lines

    def zero_grad(self, owner: Any) -> None:
        """Were they used?"""
        if not self._is_close or not self._fresh:
            return
        for index, optimizer in enumerate(self.probe.optimizers):
            if index in self._fresh and _clears(owner, optimizer):
                seen, lines = self._fresh.pop(index)
                if seen == _seen(optimizer):
                    self._gone.setdefault(index, []).append((lines, stack.site()))

    def clipped(self, parameters: list[Tensor], limit: float, norm: Any) -> None:
        """That is no use."""
        self._touched()

    def unscaled(self, scaler: Any, optimizer: Optimizer) -> None:
        """Neither is that."""
        self._touched()

    def collective_begin(self, call: Call) -> None:
        """It may reduce gradients by hand: they are written to, and used by the step all the same."""
        self._is_exchanged = self._is_exchanged or len(call.ranks) > 1

    def before_step(self, step: Step) -> None:
        """Those that are left are used now."""
        seen, lines = self._fresh.pop(step.index, ({}, 0))
        gone = self._gone.pop(step.index, [])
        if not step.due or step.closure or not gone:
            return
        now = _seen(step.optimizer)
        if not seen and not any(
            parameter.grad is not None and parameter.grad.any() for parameter in _watched(step.optimizer)
        ):
            step.facts[THROWN] = [len(gone), gone[-1][1], 1]
            return
        same = now == seen if not self._is_exchanged else _tensors(now) == _tensors(seen)
        alike = [site for each, site in gone if each == lines]
        if same and alike:
            step.facts[THROWN] = [len(alike), alike[-1], 0]

    def after_step(self, step: Step) -> None:
        """What was computed for several optimizers was used by one of them."""
        self._fresh.clear()
        self._gone.pop(step.index, None)
        if step.index == 0:
            self._is_close = self.probe.sampler.due(step.number + 1)

    def _touched(self) -> None:
        for index in self._fresh:
            self._fresh[index] = _seen(self.probe.optimizers[index]), self._fresh[index][1]


def _seen(optimizer: Optimizer) -> Seen:
    return {id(p): (id(p.grad), p.grad._version, p._version) for p in _watched(optimizer) if p.grad is not None}


def _watched(optimizer: Optimizer) -> list[Tensor]:
    own = own_parameters(optimizer)
    return own[:: max(1, len(own) // WATCHED)][:WATCHED]


def _tensors(seen: Seen) -> dict[int, tuple[int, int]]:
    return {key: (gradient, written) for key, (gradient, _, written) in seen.items()}


def _clears(owner: Any, optimizer: Optimizer) -> bool:
    """Whether owner.zero_grad() clears what this optimizer trains."""
    if not isinstance(owner, nn.Module):
        return owner is optimizer
    own = {id(parameter) for parameter in own_parameters(optimizer)}
    return any(id(parameter) in own for parameter in owner.parameters())


def _lines() -> int:
    """Of the program's own code, from the innermost outwards: the same number for the same way here."""
    found, frame, depth = 0, sys._getframe(1), 0
    while frame is not None and depth < DEPTH_MAX:
        if stack.is_program(frame):
            found = hash((found, id(frame.f_code), frame.f_lineno))
        frame, depth = frame.f_back, depth + 1
    return found

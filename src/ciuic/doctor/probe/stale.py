"""Gradients that nobody cleared: a step that uses what an earlier step has used already."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ciuic.doctor.facts_model import STALE, STALE_NAMES
from ciuic.doctor.probe.named import names_of, own_parameters
from ciuic.doctor.probe.namesake import Names
from ciuic.doctor.probe.part import Part, Step

WATCHED = 4
"""Parameters of each optimizer that are looked at."""
Seen = dict[int, tuple[int, int]]


class _Watch:
    """Of one optimizer."""

    def __init__(self) -> None:
        self.left: Seen = {}
        """Gradients that were there when an optimizer stepped, and which of them it was."""
        self.left_by = -1
        self.carried_by = -1
        """The gradients that are there now hold some that were there when this optimizer stepped; -1: they do not."""
        self.own_steps = self.other_steps = 0
        self.other = -1


class Stale(Part):
    """STALE of sampled steps; looks at a few parameters in each step."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._watches: dict[int, _Watch] = {}
        self._names = Names(probe)
        self._chosen: dict[int, list[Tensor]] = {}

    def optimizer_replaced(self, index: int, heir: int) -> None:
        """It has parameters of its own to look at."""
        self._watches.clear()
        self._chosen.clear()

    def backward_begin(self, roots: tuple[Tensor, ...]) -> None:
        """Were they cleared since the last step?"""
        for index, optimizer in enumerate(self.probe.optimizers):
            watch = self._watches.setdefault(index, _Watch())
            if watch.left_by < 0:
                if watch.carried_by >= 0 and not _seen(self._watched(index, optimizer)):
                    watch.carried_by = -1
                continue
            now = _seen(self._watched(index, optimizer))
            same = [key for key, value in watch.left.items() if now.get(key) == value]
            watch.carried_by = watch.left_by if same else -1
            watch.left_by = -1
            watch.left = {key: now[key] for key in same}

    def backward_end(self, roots: tuple[Tensor, ...]) -> None:
        """Was something added to what was left? Else it is as if nothing had happened."""
        for index, optimizer in enumerate(self.probe.optimizers):
            watch = self._watches.setdefault(index, _Watch())
            if watch.carried_by >= 0 and watch.left:
                now = _seen(self._watched(index, optimizer))
                if all(now.get(key) == value for key, value in watch.left.items()):
                    watch.left_by, watch.carried_by = watch.carried_by, -1  # not touched: still only left
                else:
                    watch.left = {}

    def before_step(self, step: Step) -> None:
        """The optimizer uses them now."""
        if step.due:
            self._chosen.pop(step.index, None)
        if not step.closure:
            self._use(step)

    def _use(self, step: Step) -> None:
        watch = self._watches.setdefault(step.index, _Watch())
        if watch.carried_by >= 0:
            if watch.carried_by == step.index:
                watch.own_steps += 1
            else:
                watch.other_steps, watch.other = watch.other_steps + 1, watch.carried_by
            if step.due:
                names = names_of(self.probe.models)
                self._names.tell(
                    step, STALE_NAMES, [names.get(id(p), "") for p in self._watched(step.index, step.optimizer)]
                )
        if step.due and (watch.own_steps or watch.other_steps):
            step.facts[STALE] = [watch.own_steps, watch.other_steps, watch.other]
            watch.own_steps = watch.other_steps = 0

    def after_step(self, step: Step) -> None:
        """What is there now has been used, or was there when another optimizer stepped."""
        if step.closure:
            self._use(step)
        for index, optimizer in enumerate(self.probe.optimizers):
            watch = self._watches.setdefault(index, _Watch())
            seen = _seen(self._watched(index, optimizer))
            if index == step.index:
                watch.carried_by = -1
                watch.left, watch.left_by = seen, (index if seen else -1)
            elif seen and watch.left_by != index:
                watch.left, watch.left_by = seen, step.index

    def _watched(self, index: int, optimizer: Optimizer) -> list[Tensor]:
        """Looked up anew at sampled steps only."""
        known = self._chosen.get(index)
        if known is None:
            own = own_parameters(optimizer)
            known = self._chosen[index] = own[:: max(1, len(own) // WATCHED)][:WATCHED]
        return known


def _seen(watched: list[Tensor]) -> Seen:
    """Which gradient tensors there are, and how often each was written to."""
    found = {}
    for parameter in watched:
        gradient = parameter.grad
        if gradient is not None:
            found[id(parameter)] = id(gradient), gradient._version
    return found

"""Evidence about learning rates and their schedulers."""

import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR

from ciuic.doctor.facts_training import HYPER, LOW, RATES, SCHEDULE, STRAY
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.stack import is_called_by
from ciuic.doctor.record import Facts, Question

GROUPS_MAX = 4
NAMES_MAX = 64
PLANNED = ("num_training_steps", "total_steps", "max_steps", "total_iters", "training_steps", "T_max")
"""Names under which a schedule keeps how many steps it was made for."""
EPOCHS_IDLE = 3
STEPS_STRAY = 3
STEPS_LEFT = 8
STEPS_HELD = 8
"""Sampled steps whose settings are kept for questions."""


@dataclass(eq=False, kw_only=True)
class Known:
    """One scheduler that the program made or stepped."""

    ref: weakref.ref[Any]
    steps: int = 0
    attempts: int = 0
    """Of its optimizer, at its last step."""
    passes: int = 0
    """Backward passes of the program, at its last step."""
    between: int = 0
    in_a_row: int = 0
    early: int = 0
    vain: int = 0
    """Steps in a row, up to the last, between which its optimizer, which had stepped, did not step."""
    is_prepared: bool = False
    """Accelerate makes its steps."""

    @property
    def scheduler(self) -> Any:
        """Alive: see `Schedules._alive`."""
        return self.ref()


class Schedules(Part):
    """Counts steps of optimizers and schedulers; keeps the lowest learning rate."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._known: list[Known] = []
        self._attempts: dict[int, int] = {}
        self._passes = 0
        self._forwards = 0
        self._lows: dict[int, list[float]] = {}
        self._epochs: dict[int, list[int]] = {}
        self._numbers: dict[tuple[int, int], dict[str, float]] = {}

    # ---- events ----------------------------------------------------------------------------------------------------

    def forward_begin(self, model: Model, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._forwards += torch.is_grad_enabled()

    def backward_begin(self, roots: Any) -> None:
        self._passes += 1

    def optimizer_replaced(self, index: int, heir: int) -> None:
        """Another optimizer may begin with another rate."""
        self._lows.pop(index, None)

    def loader_begins(self, loader: Any) -> None:
        self._epochs.setdefault(id(loader), [0, 0])[1] = sum(self._attempts.values())

    def loader_ends(self, loader: Any, batches: int) -> None:
        epoch = self._epochs.setdefault(id(loader), [0, 0])
        epoch[0] += sum(self._attempts.values()) > epoch[1]  # steps were made with it

    def scheduler_made(self, scheduler: Any) -> None:
        if not isinstance(scheduler, SWALR) and all(known.scheduler is not scheduler for known in self._alive()):
            self._known.append(Known(ref=weakref.ref(scheduler)))

    def scheduler_step(self, scheduler: Any) -> None:
        known = next((each for each in self._alive() if each.scheduler is scheduler), None)
        if known is None:
            known = Known(ref=weakref.ref(scheduler))
            self._known.append(known)
        attempts = self._attempts.get(id(_innermost(scheduler.optimizer)), 0)
        known.vain = known.vain + 1 if known.steps and attempts and attempts == known.attempts else 0
        if known.steps and attempts == known.attempts:
            if self._passes > known.passes:
                known.between += 1
            elif attempts:
                known.in_a_row += 1
        if not attempts and (self._forwards or self._passes):
            known.early += 1
        if not known.steps:
            known.is_prepared = is_called_by("accelerate.scheduler")
        known.steps += 1
        known.attempts, known.passes = attempts, self._passes

    def before_step(self, step: Step) -> None:
        rate = float(step.optimizer.param_groups[0]["lr"]) if step.due or not self._on_device(step) else None
        if rate is not None:
            low = self._lows.setdefault(step.index, [rate, step.number, rate, rate])
            if rate < low[0] * (1 - 1e-6):
                low[:3] = [rate, step.number, low[3]]
            low[3] = max(low[3], rate)
        if step.due:
            groups = step.optimizer.param_groups[:GROUPS_MAX]
            step.facts[RATES] = [float(group["lr"]) for group in groups]
            numbers = _numbers(step.optimizer)
            step.facts[HYPER] = zlib.crc32(repr(sorted(numbers.items())).encode())
            self._numbers[step.index, step.number] = dict(list(numbers.items())[:NAMES_MAX])
            if len(self._numbers) > STEPS_HELD:
                del self._numbers[next(iter(self._numbers))]

    def after_step(self, step: Step) -> None:
        self._attempts[id(step.optimizer)] = step.number
        if not step.due:
            return
        low = self._lows.get(step.index)
        if low is not None and low[1] > 1:
            step.facts[LOW] = [low[0], int(low[1]), low[2]]
        own = [known for known in self._alive() if _innermost(known.scheduler.optimizer) is step.optimizer]
        if own:
            known = max(own, key=lambda each: each.steps)
            last = getattr(known.scheduler, "last_epoch", 0)
            name = type(known.scheduler).__name__
            counts = [known.between, known.in_a_row, known.early, int(known.is_prepared)]
            step.facts[SCHEDULE] = [name, known.steps, last, planned_steps(known.scheduler), *counts]
        stray = self._left(step.optimizer) or (self._stray() if step.index == 0 else None)
        if stray is not None:
            step.facts[STRAY] = stray

    def answer(self, question: Question) -> Facts | None:
        if question.kind != HYPER:
            return None
        return dict(self._numbers.get((question.facts["optimizer"], question.facts["step"]), {}))

    # ---- schedulers that turn nothing ------------------------------------------------------------------------------

    def _stray(self) -> list[Any] | None:
        stepping = list(self.probe.optimizers)
        tables = {id(optimizer.param_groups[0]) for optimizer in stepping if optimizer.param_groups}
        turned: dict[int, list[Known]] = {}
        for known in self._alive():
            owner = _innermost(known.scheduler.optimizer)
            name = type(known.scheduler).__name__
            is_known = id(owner.param_groups[0]) in tables or self._attempts.get(id(owner), 0) > 0
            if not is_known and known.steps >= STEPS_STRAY and max(self._attempts.values()) >= STEPS_STRAY:
                return [name, known.steps, type(owner).__name__, "stranger"]
            turned.setdefault(id(owner.param_groups[0]), []).append(known)
        return self._idle(turned, tables) or self._twin(turned, tables)

    def _alive(self) -> list[Known]:
        """Those that the program still has: to hold others would hold their optimizers' moments."""
        self._known = [known for known in self._known if known.ref() is not None]
        return self._known

    def _left(self, successor: Optimizer) -> list[Any] | None:
        """A scheduler still turns the rate of an optimizer whose parameters this one has taken over."""
        if any(_innermost(known.scheduler.optimizer) is successor for known in self._alive()):
            return None
        for known in self._alive():
            owner = _innermost(known.scheduler.optimizer)
            if known.vain >= STEPS_LEFT and _first_parameter(owner) in _parameters(successor):
                return [type(known.scheduler).__name__, known.vain, type(owner).__name__, "left"]
        return None

    def _idle(self, turned: dict[int, list[Known]], tables: set[int]) -> list[Any] | None:
        epochs = max((ended for ended, _ in self._epochs.values()), default=0)
        for table, schedulers in turned.items():
            if table in tables and epochs >= EPOCHS_IDLE and not any(known.steps for known in schedulers):
                last = schedulers[-1].scheduler
                return [type(last).__name__, epochs, type(_innermost(last.optimizer)).__name__, "idle"]
        return None

    def _twin(self, turned: dict[int, list[Known]], tables: set[int]) -> list[Any] | None:
        if all(table in turned for table in tables):
            return None
        for schedulers in turned.values():
            names = [type(known.scheduler).__name__ for known in schedulers if known.steps >= STEPS_STRAY]
            for name in set(names):
                if names.count(name) > 1:
                    steps = max(known.steps for known in schedulers)
                    return [name, steps, type(_innermost(schedulers[0].scheduler.optimizer)).__name__, "twin"]
        return None

    def _on_device(self, step: Step) -> bool:
        rate = step.optimizer.param_groups[0]["lr"]
        return isinstance(rate, torch.Tensor) and rate.device.type != "cpu"


def planned_steps(scheduler: Any) -> int:
    """How many steps a scheduler was made for; 0: it does not say."""
    members = getattr(scheduler, "_schedulers", None)
    marks = getattr(scheduler, "_milestones", None)
    if members:
        last = planned_steps(members[-1])
        return last + (int(marks[-1]) if marks else 0) if last else 0
    for name in PLANNED:
        value = vars(scheduler).get(name)
        if isinstance(value, int | float) and value > 0:
            return int(value)
    for function in getattr(scheduler, "lr_lambdas", ()):
        for name, value in _bound(function):
            if name in PLANNED and isinstance(value, int | float) and value > 0:
                return int(value)
    return 0


def _bound(function: Any) -> Iterator[tuple[str, Any]]:
    """What a lambda or partial function was made with, by name."""
    yield from getattr(function, "keywords", {}).items()
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    for name, cell in zip(code.co_freevars if code else (), cells or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _innermost(optimizer: Any) -> Any:
    """Without wrappers (Accelerate's, Lightning's)."""
    for _ in range(4):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            return optimizer
        optimizer = inner
    return optimizer


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _first_parameter(optimizer: Optimizer) -> int:
    return next((id(parameter) for group in optimizer.param_groups for parameter in group["params"]), 0)


def _numbers(optimizer: Optimizer) -> dict[str, float]:
    """The settings of all groups except the learning rate, by name."""
    found: dict[str, float] = {}
    for at, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            if name in ("params", "lr", "initial_lr") or not all(isinstance(v, bool | int | float) for v in values):
                continue
            for part, number in enumerate(values):
                suffix = f"[{part}]" if len(values) > 1 else ""
                found[f"group {at} {name}{suffix}"] = float(number)
    return found

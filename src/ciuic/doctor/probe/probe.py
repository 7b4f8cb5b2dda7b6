"""The probe: gives events to the parts, counts steps, sends records. One for a process."""

import contextlib
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ciuic.doctor.facts import UNEVEN
from ciuic.doctor.facts_training import TAKEN
from ciuic.doctor.probe.courier import Courier
from ciuic.doctor.probe.discover import find_models
from ciuic.doctor.probe.heirs import Heirs
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.probe.stack import is_stepping
from ciuic.doctor.record import PROBE_FAILED, Facts, Notice, Question, Record
from ciuic.doctor.sampling import COST, STEP_TIME, Sampler

SEARCHES_MAX = 64
"""Optimizers whose models are searched for in all that the interpreter holds, which takes long; those of later ones are
known when they were wrapped."""


class _Gone:
    """In the place of an optimizer that the program has let go."""

    param_groups: tuple[()] = ()
    state: Mapping[Any, Any] = {}


_GONE: Any = _Gone()


class Probe:
    """`parts` are made by the caller (see `attach`) with this probe."""

    def __init__(self, courier: Courier, *, rank: int, world: int, every: int = 10) -> None:
        self.rank, self.world = rank, world
        self.courier = courier
        self.sampler = Sampler(every=every)
        self._models: list[Model] = []
        self._models_found = self._searches = 0
        self.parts: list[Part] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        """By index, which a new one gets from one that is no more. Nothing is kept alive: a program may train one model
        after the other."""
        self.phase, self.phase_since_s = "start", time.monotonic()
        self.thread = threading.get_ident()
        """The thread that trains: at first the one that made this."""
        self.spent_s: dict[str, float] = {}
        """Wall time of the training thread by phase, up to the last change."""
        self.is_uneven = False
        """Join has let this rank wait for others that had more inputs: steps of a number are not the same step."""
        self.tools: set[int] = set()
        """Optimizers that step inside another one's step: what they do is the other one's."""
        self.step = 0
        """Attempts of the first optimizer so far."""
        self.extra: set[tuple[int, int]] = set()
        """Optimizer and step that a part wants sampled beside the due ones; all ranks must come to the same."""
        self.packing, self.packed_until = 0, 0
        """Hooks on saved tensors that are open now, and the sequence number of autograd when the last was left."""
        self.heirs = Heirs()
        self._numbers: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._open: dict[int, Step] = {}
        self._handlers: dict[str, list[Callable[..., Any]]] = {}
        self._inside = threading.local()
        self._cost_ns = 0
        self.spent_ns = 0
        """Processor time of the parts in the program's own threads, in all."""
        self._last_s, self._last_number = time.perf_counter(), 0

    @property
    def models(self) -> list[Model]:
        """Those that the program still has."""
        return [model for model in self._models if model.is_there]

    @property
    def optimizers(self) -> list[Optimizer]:
        """By index; an empty one for those that are no more."""
        return [reference() or _GONE for reference in self._optimizers]

    # ---- parts -----------------------------------------------------------------------------------------------------

    def add(self, part: Part) -> None:
        """From now on it gets its events."""
        self.parts.append(part)
        for name in vars(Part):
            if not name.startswith("_") and getattr(type(part), name) is not getattr(Part, name):
                self._handlers.setdefault(name, []).append(getattr(part, name))

    def has(self, event: str) -> bool:
        """Whether anybody listens."""
        return bool(self._handlers.get(event))

    def emit(self, event: str, *arguments: Any) -> None:
        """To all parts that listen. A part's error is reported and its handler switched off."""
        handlers = self._handlers.get(event)
        if not handlers or getattr(self._inside, "now", False):
            return
        began_ns = time.thread_time_ns()
        self._inside.now = True
        try:
            for handler in tuple(handlers):
                try:
                    handler(*arguments)
                except Exception as error:
                    if _is_of_signal(error):
                        raise  # the program's: its signal handler happened to run now
                    with contextlib.suppress(ValueError):  # it has failed in two threads at once
                        handlers.remove(handler)
                    self._failed(handler, event, error)
        finally:
            self._inside.now = False
            spent_ns = time.thread_time_ns() - began_ns
            self._cost_ns += spent_ns
            self.spent_ns += spent_ns

    def account(self, began_ns: int) -> None:
        """What was done for the parts since then, by time.thread_time_ns(), outside of their handlers."""
        spent_ns = time.thread_time_ns() - began_ns
        self._cost_ns += spent_ns
        self.spent_ns += spent_ns

    def gather(self, event: str, *arguments: Any) -> Facts:
        """The facts that all parts give for a beat or the last message."""
        found: Facts = {}
        for handler in tuple(self._handlers.get(event, ())):
            try:
                found.update(handler(*arguments) or {})
            except Exception as error:  # noqa: BLE001 - as in emit
                with contextlib.suppress(ValueError):
                    self._handlers[event].remove(handler)
                self._failed(handler, event, error)
        return found

    def answer(self, question: Question) -> Facts:
        """From the courier's thread."""
        for part in self.parts:
            try:
                found = part.answer(question)
            except Exception as error:  # noqa: BLE001 - as in emit
                self._failed(part.answer, "answer", error)
                continue
            if found is not None:
                return found
        return {}

    def _failed(self, handler: Callable[..., Any], event: str, error: Exception) -> None:
        owner = type(getattr(handler, "__self__", handler)).__name__
        line = error.__traceback__
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        where = f"{line.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line.tb_lineno}" if line is not None else ""
        self.note(PROBE_FAILED, part=owner, event=event, error=f"{type(error).__name__}: {error} ({where})"[:300])

    def mute(self, wanted: bool) -> None:
        """Whether the calling thread's events are let through: for measuring what looking costs."""
        self._inside.now = wanted

    @property
    def is_mute(self) -> bool:
        """Whether the calling thread's events are not let through now."""
        return bool(getattr(self._inside, "now", False))

    # ---- what parts and hooks say ------------------------------------------------------------------------------------

    def note(self, kind: str, **facts: Any) -> None:
        """Send a rare event now."""
        self.courier.send(Notice(rank=self.rank, step=self.step, kind=kind, facts=facts))

    def enter(self, phase: str) -> str:
        """The training thread does something else now; the phase before. Other threads are not counted."""
        before = self.phase
        if threading.get_ident() == self.thread:
            now_s = time.monotonic()
            self.spent_s[before] = self.spent_s.get(before, 0.0) + now_s - self.phase_since_s
            self.phase, self.phase_since_s = phase, now_s
        return before

    def model_of(self, module: nn.Module) -> Model | None:
        """The model that this module, or wrapper, is."""
        return next((model for model in self.models if module is model.module or module is model.wrapper), None)

    def found(self, model: Model) -> None:
        """A new model."""
        model.index, self._models_found = self._models_found, self._models_found + 1
        self._models = [*self.models, model]
        self.emit("model_found", model)

    def index_of(self, optimizer: Optimizer, *, trained: bool = True) -> int:
        """Of an optimizer; a new one is looked at first."""
        for index, known in enumerate(self._optimizers):
            if known() is optimizer:
                return index
        index = self._room()
        is_again = index < len(self._optimizers)
        self._optimizers[index : index + 1] = [weakref.ref(optimizer)]
        models: list[Model] = []
        try:
            if self._searches < SEARCHES_MAX:
                self._searches += 1
                models = find_models(optimizer, self.models, trained=trained)
        except Exception as error:  # noqa: BLE001 - it looks at everything that the program has made
            self._failed(find_models, "step", error)
        for model in models:
            self.found(model)
        self.heirs.forget(index)
        self.heirs.found(self.optimizers, index)
        self.emit("optimizer_found", optimizer, index)
        if is_again:
            self.emit("optimizer_replaced", index, index)
        return index

    def _room(self) -> int:
        """The index of an optimizer that is no more, or a new one."""
        for index, known in enumerate(self._optimizers):
            if known() is None and index not in self._open:
                self.tools.discard(index)
                return index
        return len(self._optimizers)

    def _succeed(self, heir: int, index: int) -> None:
        """An optimizer takes the place of an earlier one, and its number; that one is let go."""
        self._optimizers[index] = self._optimizers[heir]
        if heir == len(self._optimizers) - 1:
            self._optimizers.pop()
        self._numbers[index] = self._numbers.get(index, 0) + self._numbers.pop(heir, 0)
        self._taken[index] = self._taken.get(index, 0) + self._taken.pop(heir, 0)
        self.emit("optimizer_replaced", index, heir)

    def others(self, index: int) -> list[Optimizer]:
        """The optimizers beside this one that are nobody's tools; none for a tool."""
        if index in self.tools:
            return []
        return [each for at, each in enumerate(self.optimizers) if at != index and at not in self.tools]

    def number_of(self, index: int) -> int:
        """Attempts of an optimizer so far."""
        return self._numbers.get(index, 0)

    # ---- steps: called by the hooks --------------------------------------------------------------------------------

    def attempt(self, optimizer: Optimizer, *, closure: bool, scaler: Any = None) -> Step:
        """An optimizer is about to step, or a scaler is about to decide whether it does."""
        index = self.index_of(optimizer, trained=not closure)
        self._open = {at: step for at, step in self._open.items() if is_stepping(step.optimizer)}  # else it has raised
        known = self._open.get(index)
        if known is not None and scaler is None and known.scaler is not None:  # the scaler has opened it
            known.closure = known.closure or closure
            return known
        self._open.pop(index, None)
        if self._open:
            self.tools.add(index)
        elif index not in self.tools:
            earlier = self.heirs.steps(index)
            if earlier is not None:
                self._succeed(index, earlier)
                index = earlier
        number = self._numbers[index] = self._numbers.get(index, 0) + 1
        self.thread = threading.get_ident()
        if index == 0:
            self.step = number
        due = self.sampler.due(number) or (index, number) in self.extra
        self.extra.discard((index, number))
        step = Step(optimizer=optimizer, index=index, number=number, due=due, closure=closure, scaler=scaler)
        self._open[index] = step
        return step

    def current(self, optimizer: Optimizer) -> Step | None:
        """The attempt of an optimizer that is under way."""
        return next((step for step in self._open.values() if step.optimizer is optimizer), None)

    def finish(self, step: Step) -> None:
        """It has stepped or was skipped."""
        if self._open.pop(step.index, None) is None:
            return
        if step.taken:
            self._taken[step.index] = self._taken.get(step.index, 0) + 1
        self.emit("after_step", step)
        if step.due:
            self._send(step)
        for model in self.models:
            model.forwards = model.wrapper_forwards = model.synced_forwards = 0

    def _send(self, step: Step) -> None:
        now_s = time.perf_counter()
        if step.index == 0:
            steps = max(1, step.number - self._last_number)
            step.facts[STEP_TIME] = (now_s - self._last_s) / steps
            step.facts[COST] = self._cost_ns / 1e9
            self._last_s, self._last_number, self._cost_ns = now_s, step.number, 0
        if self.is_uneven:
            step.facts[UNEVEN] = True
        step.facts[TAKEN] = self._taken.get(step.index, 0)
        record = Record(rank=self.rank, optimizer=step.index, step=step.number, time_s=time.time(), facts=step.facts)
        self.courier.send(record)


def _is_of_signal(error: Exception) -> bool:
    """Whether a signal's handler raised it: torch's for data workers that have died, or one of the program's."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers} - {None}
    line = error.__traceback__
    while line is not None:
        if line.tb_frame.f_code in codes:
            return True
        line = line.tb_next
    return False


def ranks_here() -> tuple[int, int]:
    """Rank and world of this process as far as torch.distributed knows; 0 and 1 without it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

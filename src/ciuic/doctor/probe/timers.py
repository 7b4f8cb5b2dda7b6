"""How long each phase of a step takes on this rank, apart from waiting for others: numbers for the record."""

import statistics
from collections import deque
from typing import Any

import torch

from ciuic.doctor.facts_waiting import QUEUED, STEP_USUAL, TIMES, WINDOW
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.probe.stack import all_queued_s
from ciuic.doctor.record import Facts

STEPS_FIRST = 3
"""Not counted: compilation, workers that start, DDP's first buckets."""
WINDOW_MIN = 4
"""Steps of one window: fewer say nothing."""
MEASURED_MAX = 7
"""Steps of a window that are measured; the steps after them, up to the next record, cost only the clock."""
USUAL_OVER = 32
WAITS_LONG_US = 10_000
"""From there on it is worth to know whether the process got its processors."""
PHASES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "step": "update",
    "save": "save",
    "collective": "waits",
}
"""Of the probe, and the name in TIMES; all others are `other`."""


class Timers(Part):
    """Wall times by phase; the wait for DDP's reductions is taken out of the backward pass."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._window: deque[dict[str, float]] = deque()
        self._steps: deque[float] = deque(maxlen=USUAL_OVER)
        self._last: dict[str, float] | None = None
        """Times of the last step; DDP tells how long it waited only in the next forward pass."""
        self._before: dict[str, float] = {}
        self._count = 0
        self._synced: set[int] = set()
        """Models whose next backward pass reduces."""
        self._unread: dict[int, int] = {}
        """By model: step of the backward pass whose wait was not read yet; DDP tells it in its next such forward."""
        self._reductions_s = 0.0
        self._read_ns: dict[int, int] = {}
        self._all_queued: tuple[int, float] | None = None
        self._usual_s = 0.0

    def model_found(self, model: Model) -> None:
        """DDP measures its first ten passes, then each hundredth: too few. On a GPU it would have to wait for that."""
        rate = getattr(model.wrapper, "_set_ddp_runtime_logging_sample_rate", None)
        if rate is not None and all(parameter.device.type == "cpu" for _, parameter in model.parameters()):
            rate(1)

    def wrapper_begin(self, model: Model) -> None:
        if torch.is_grad_enabled() and getattr(model.wrapper, "require_backward_grad_sync", True):
            self._synced.add(model.index)

    def backward_end(self, roots: Any) -> None:
        self._unread.update(dict.fromkeys(self._synced, self._count))
        self._synced.clear()

    def forward_begin(self, model: Model, inputs: Any, keywords: Any) -> None:
        if model.index not in self._unread or len(self._window) >= MEASURED_MAX:
            return
        waited_s = self._waited_s(model)
        if waited_s is None:
            return
        number = self._unread.pop(model.index)
        if number == self._count:
            self._reductions_s += waited_s
        elif number == self._count - 1 and self._last is not None:
            _move(self._last, waited_s)

    def _waited_s(self, model: Model) -> float | None:
        """From the last gradient to the end of the reductions, in DDP's last backward pass; None: not yet known."""
        data = getattr(getattr(model.wrapper, "logger", None), "_get_ddp_logging_data", None)
        if data is None:
            return None
        times = data().ints_map
        ready, done = times.get("backward_compute_time_end", 0), times.get("backward_comm_time_end", 0)
        is_new = self._read_ns.get(model.index) != ready
        self._read_ns[model.index] = ready
        return (done - ready) / 1e9 if is_new and done > ready > 0 else None

    def after_step(self, step: Step) -> None:
        if step.index:
            return
        self._count += 1
        if self._last is not None:
            self._window.append(self._last)
        has_room = len(self._window) < MEASURED_MAX
        if not has_room and not step.due:
            self._last = None
            return
        spent, before = dict(self.probe.spent_s), self._before
        self._last = self._times(spent, before) if has_room and step.number > STEPS_FIRST else None
        self._before, self._reductions_s = spent, 0.0
        if step.due:
            self._tell(step)

    def _times(self, spent: dict[str, float], before: dict[str, float]) -> dict[str, float]:
        """Of the step that has ended."""
        times = dict.fromkeys(TIMES, 0.0)
        for phase, total_s in spent.items():
            times[PHASES.get(phase, "other")] += total_s - before.get(phase, 0.0)
        times["step"] = sum(times.values())
        times["work"] = times["step"] - times["waits"] - times["save"]
        _move(times, self._reductions_s)
        self._steps.append(times["step"])
        return times

    def _tell(self, step: Step) -> None:
        if self._steps:
            self._usual_s = statistics.median(self._steps)
        if self._all_queued is None:
            self._all_queued = step.number, all_queued_s()
        if len(self._window) < WINDOW_MIN:
            return
        quartile, least = summary(list(self._window))
        step.facts[WINDOW] = [len(self._window), *quartile, *least]
        self._window.clear()
        if quartile[TIMES.index("waits")] > WAITS_LONG_US:
            number, before_s = self._all_queued
            now_s = all_queued_s()
            step.facts[QUEUED] = round(1e6 * max(0.0, now_s - before_s) / max(1, step.number - number))
            self._all_queued = step.number, now_s

    def tick(self) -> Facts:
        return {STEP_USUAL: round(self._usual_s, 6)} if self._usual_s else {}


def _move(times: dict[str, float], waited_s: float) -> None:
    """The wait for reductions happens inside the backward pass and is no part of its work."""
    moved_s = min(waited_s, times["backward"])
    times["backward"] -= moved_s
    times["work"] -= moved_s
    times["waits"] += moved_s


def summary(window: list[dict[str, float]]) -> tuple[list[int], list[int]]:
    """Microseconds of each of TIMES: the lower quartile over the steps, and the least."""
    ordered = [sorted(times[name] for times in window) for name in TIMES]
    low = (len(window) - 1) // 4
    return [round(1e6 * values[low]) for values in ordered], [round(1e6 * values[0]) for values in ordered]

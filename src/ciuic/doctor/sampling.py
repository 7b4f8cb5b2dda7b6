"""Which steps are looked at closely: the first few, then every k-th; k grows where looking costs too much.

All ranks must look at the same steps, so the collector decides k and says from which later step on it holds.
"""

import math

from ciuic.doctor.record import Record, Schedule

FIRST_STEPS = 4
"""Each of them is sampled: most faults are there from the start."""
DENSE_STEPS = 20
"""Up to here k is never widened."""
ALLOWANCE_S = 0.1
"""Processor time of each rank before its samples cost too much: small programs are looked at closely for longer."""
BUDGET = 0.002
"""Share of a step's time that samples may take on average."""
EVERY_MAX = 1000
COST, STEP_TIME = "cost_s", "step_s"
"""Facts of a record: processor time of its sample, and the time of a step, both in seconds."""


class Sampler:
    """The rank's side."""

    def __init__(self, *, every: int = 10) -> None:
        self._schedules = [Schedule(start=0, every=max(1, every))]

    def due(self, step: int) -> bool:
        """Whether this step (from 1) is sampled."""
        if step <= FIRST_STEPS:
            return True
        for schedule in reversed(self._schedules):
            if schedule.start <= step:
                return step % schedule.every == 0
        return False

    def follow(self, schedule: Schedule) -> None:
        """A new schedule from the collector."""
        self._schedules = [known for known in self._schedules if known.start < schedule.start] + [schedule]


class Pace:
    """The collector's side."""

    def __init__(self, *, every: int = 10, adapt: bool = True) -> None:
        self.schedule = Schedule(start=0, every=max(1, every))
        self._least, self._adapt = max(1, every), adapt
        self._spent_s: dict[int, float] = {}
        """By rank: processor time of its samples so far."""
        self._step_s = math.inf
        """Of the fastest steps so far: a machine that is busy now will not be so for ever."""

    def seen(self, record: Record) -> Schedule | None:
        """A new schedule when the samples of this rank cost more than they may."""
        cost_s, step_s = record.facts.get(COST, 0.0), record.facts.get(STEP_TIME, 0.0)
        spent_s = self._spent_s[record.rank] = self._spent_s.get(record.rank, 0.0) + cost_s
        if not self._adapt or record.step < DENSE_STEPS or not step_s > 0 or not cost_s > 0:
            return None
        if spent_s < ALLOWANCE_S:
            return None
        self._step_s = min(self._step_s, step_s)
        wanted = min(EVERY_MAX, max(self._least, math.ceil(cost_s / (self._step_s * BUDGET))))
        if wanted <= 1.5 * self.schedule.every or record.step < self.schedule.start:
            return None
        # far enough ahead for the slowest rank to have heard of it
        self.schedule = Schedule(start=record.step + 2 * self.schedule.every, every=wanted)
        return self.schedule

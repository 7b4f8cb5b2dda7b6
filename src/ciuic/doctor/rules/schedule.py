"""Class G: learning rates and the steps of their schedulers."""

from collections.abc import Iterable, Sequence
from typing import Any

from ciuic.doctor.case import Asked, Case, Round, Rule, odd_ones
from ciuic.doctor.facts_model import EXCHANGE, MODE
from ciuic.doctor.facts_training import FORM, HYPER, LOW, RATES, SCHEDULE, STRAY
from ciuic.doctor.finding import Finding, Severity

CYCLIC = ("CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR", "ReduceLROnPlateau")
"""Schedulers whose rate may rise again."""
ROUNDS_FIRST = 4
STEPS_MIN = 3
JUMP = 2.0
"""The first rate is so many times the second one, and then rates rise: the warm-up came too late."""
ENDED_STEPS, ENDED_SHARE = 3, 0.1
"""A rate that has been at its end for so many steps, and so much of the run, ended too early."""
AT_END = 1e-3
"""Of the highest rate: below it a schedule is at its end."""
RISE = 0.05
"""Of the way from the lowest rate to the highest: a rise that is meant, not rounding."""


class Schedule(Rule):
    """Looks at the rates of each optimizer in order."""

    def __init__(self) -> None:
        self._rates: dict[int, dict[int, float]] = {}
        self._asked: set[int] = set()
        self._exchanges = False
        """Gradients or parameters have been exchanged."""

    def round(self, case: Case, round: Round) -> Iterable[Finding]:
        rates = round.values(RATES)
        if rates:
            self._rates.setdefault(round.optimizer, {})[round.step] = next(iter(rates.values()))[0]
        self._exchanges = self._exchanges or any(value[0] or value[2] for value in round.values(EXCHANGE).values())
        is_alone = set(round.values(MODE).values()) == {"plain"} and not self._exchanges
        for ranks in [] if is_alone else round.groups():  # models of their own may have rates of their own
            yield from self._apart(case, round, ranks)
        schedules = round.values(SCHEDULE)
        if schedules:
            schedule = next(iter(schedules.values()))
            yield from self._too_often(round, schedule)
            yield from self._comes_back(round, schedule)
            yield from self._too_early(round, schedule)
        yield from self._late_warm_up(round)
        stray = next(iter(round.values(STRAY).values()), None)
        if stray is not None:
            yield _stray(round, stray)

    # ---- ranks that differ -------------------------------------------------------------------------------------------

    def _apart(self, case: Case, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        schedules = {rank: round_.records[rank].facts.get(SCHEDULE) for rank in ranks}
        counts = {rank: schedule[1] for rank, schedule in schedules.items() if schedule is not None}
        if len(counts) == len(ranks) and len(set(counts.values())) > 1:
            odd = odd_ones(counts)
            told = ", ".join(f"{count} on rank {rank}" for rank, count in list(counts.items())[:4])
            yield Finding(
                code="CIUIC-G8",
                cause=f"the scheduler has made another number of steps on {_ranks(odd)} ({told}) "
                f"at the same {round_.step} steps of the optimizer",
                step=round_.step,
                ranks=odd,
                evidence={f"scheduler_steps_rank_{rank}": count for rank, count in list(counts.items())[:8]},
                confidence=0.95,
            )
            return
        rates = {rank: round_.records[rank].facts.get(RATES) for rank in ranks}
        if all(rates.values()):
            yield from _rates_apart(round_, {rank: list(rate or ()) for rank, rate in rates.items()})
        settings = {rank: round_.records[rank].facts.get(HYPER) for rank in ranks}
        if None not in settings.values() and len(set(settings.values())) > 1 and round_.optimizer not in self._asked:
            self._asked.add(round_.optimizer)
            facts = {"optimizer": round_.optimizer, "step": round_.step}
            case.ask(self, HYPER, ranks, facts=facts, about=round_.step)

    def answered(self, case: Case, asked: Asked) -> Iterable[Finding]:
        names = sorted({name for facts in asked.answers.values() for name in facts})
        for name in names:
            values = {rank: facts.get(name) for rank, facts in asked.answers.items()}
            if len(values) < 2 or len(set(values.values())) == 1:
                continue
            odd = odd_ones(values)
            setting = name.split(" ", 2)[-1]
            told = ", ".join(f"{value} on rank {rank}" for rank, value in list(values.items())[:4])
            yield Finding(
                code="CIUIC-G4",
                cause=f"{_ranks(odd)} has another {setting} than the others: {told}",
                step=asked.about,
                ranks=odd,
                evidence={f"{setting}_rank_{rank}": str(value) for rank, value in list(values.items())[:8]},
                fix=f"give the optimizer the same {setting} on all ranks",
                confidence=0.95,
            )
            return

    # ---- schedules ---------------------------------------------------------------------------------------------------

    def _too_often(self, round_: Round, schedule: Sequence[Any]) -> Iterable[Finding]:
        name, steps, last, planned, between, in_a_row, _, is_prepared = schedule
        attempts = round_.step
        if attempts < STEPS_MIN:
            return
        forms = round_.values(FORM)
        micro = next(iter(forms.values()))[0] if forms else 1
        ended = self._ended(round_) or 0 < planned < last
        # steps after the newest attempt come in the next record
        more = between + in_a_row - (micro - 1) * (attempts - 1)  # the newest step's are not all in this record
        if micro > 1 and 0 <= more < micro and not is_prepared:
            yield Finding(
                code="CIUIC-G2",
                cause=f"{name} steps at every micro-batch, {steps} times in {attempts} steps of the optimizer: "
                f"the schedule runs {micro} times too fast",
                step=_first(round_),
                evidence={"scheduler_steps": steps, "optimizer_steps": attempts, "planned_steps": planned},
                confidence=0.95 if ended else 0.85,
            )
        elif in_a_row >= 0.8 * (attempts - 1):
            yield self._several(round_, schedule, ended=ended)

    def _several(self, round_: Round, schedule: Sequence[Any], *, ended: bool) -> Finding:
        name, steps, last, planned, _, in_a_row, _, is_prepared = schedule
        each = 1 + round(in_a_row / max(1, round_.step - 1))
        how = f"it has ended after {planned or last} of its steps while training goes on" if ended else ""
        return Finding(
            code="CIUIC-G1",
            cause=f"{name} steps {each} times at each step of the optimizer" + (f": {how}" if how else ""),
            step=_first(round_),
            evidence={"scheduler_steps": steps, "optimizer_steps": round_.step, "planned_steps": planned},
            fix=f"give the schedule {each} times as many steps, or let it step once (split_batches=True in Accelerate)",
            confidence=0.95 if ended else 0.4 if is_prepared else 0.6,
            severity=None if ended else Severity.NOTE if is_prepared else Severity.WARNING,
        )

    def _ended(self, round_: Round) -> bool:
        """Whether the rate has been at its end, or has come back from it, for a good part of the run."""
        low = next(iter(round_.values(LOW).values()), None)
        if low is None or low[2] <= 0:
            return False
        since = round_.step - low[1]
        return low[0] <= AT_END * low[2] and since >= max(ENDED_STEPS, ENDED_SHARE * round_.step)

    def _comes_back(self, round_: Round, schedule: Sequence[Any]) -> Iterable[Finding]:
        name, steps, last, planned = schedule[:4]
        low = next(iter(round_.values(LOW).values()), None)
        if low is None or name in CYCLIC or not 0 < planned < last:
            return
        lowest, at, highest = low
        now = next(iter(round_.values(RATES).values()))[0]
        if now - lowest < RISE * (highest - lowest) or highest <= lowest:
            return
        yield Finding(
            code="CIUIC-G6",
            cause=f"the learning rate rises again, from {lowest:.3g} at step {at} to {now:.3g} now: "
            f"{name} was made for {planned} steps and has made {last}",
            step=int(at) + 1,
            evidence={"lowest": lowest, "now": now, "planned_steps": planned, "scheduler_steps": steps},
            confidence=0.9,
        )

    def _too_early(self, round_: Round, schedule: Sequence[Any]) -> Iterable[Finding]:
        name, early = schedule[0], schedule[6]
        if early == 1 and round_.step >= STEPS_MIN:
            yield Finding(
                code="CIUIC-G7",
                cause=f"{name} steps before the optimizer's first step: the first value of the schedule is never used",
                step=1,
                evidence={"scheduler_steps_before": early},
                confidence=0.8,
            )

    def _late_warm_up(self, round_: Round) -> Iterable[Finding]:
        rates = self._rates.get(round_.optimizer, {})
        first = [rates.get(step) for step in range(1, ROUNDS_FIRST + 1)]
        schedule = next(iter(round_.values(SCHEDULE).values()), None)
        if any(rate is None for rate in first) or (schedule is not None and schedule[0] in CYCLIC):
            return
        one, two, three, four = (float(rate or 0.0) for rate in first)
        if one >= JUMP * two and two < three <= four:
            yield Finding(
                code="CIUIC-G3",
                cause=f"the first step is made with a learning rate of {one:.3g}, the second with {two:.3g}, "
                f"and then it rises: the warm-up begins one step too late",
                step=1,
                evidence={"rate_step_1": one, "rate_step_2": two, "rate_step_3": three},
                confidence=0.9,
            )


def _rates_apart(round_: Round, rates: dict[int, list[float]]) -> Iterable[Finding]:
    for group in range(min(len(each) for each in rates.values())):
        values = {rank: each[group] for rank, each in rates.items()}
        if max(values.values()) - min(values.values()) <= 1e-9 * max(values.values()):
            continue
        odd = odd_ones(values)
        told = ", ".join(f"{value:.4g} on rank {rank}" for rank, value in list(values.items())[:4])
        yield Finding(
            code="CIUIC-G4",
            cause=f"{_ranks(odd)} has another learning rate than the others: {told}"
            + (f" (group {group})" if group else ""),
            step=round_.step,
            ranks=odd,
            evidence={f"rate_rank_{rank}": value for rank, value in list(values.items())[:8]},
            confidence=0.97,
        )
        return


def _stray(round_: Round, stray: Sequence[Any]) -> Finding:
    name, number, owner, what = stray
    if what == "idle":
        cause = f"{name} was made for this {owner} and has not made one step in {number} epochs"
        fix, sure = "call scheduler.step() after optimizer.step(), or once per epoch", 0.7
    elif what == "twin":
        cause = f"two schedulers ({name}) turn the learning rate of one {owner}, and another optimizer has none"
        fix, sure = "give each scheduler its own optimizer", 0.8
    elif what == "left":
        cause = (
            f"{name} has made {number} steps in a row on a {owner} that steps no more: optimizer {round_.optimizer} "
            "has taken its parameters over, and its learning rate stays as it is"
        )
        fix, sure = "make the scheduler anew from the optimizer that steps now", 0.9
    else:
        cause = f"{name} has made {number} steps on a {owner} that never steps: the learning rate in use stays as it is"
        fix, sure = "make the scheduler from the optimizer that steps, after it was built for the last time", 0.95
    return Finding(
        code="CIUIC-G5", cause=cause, step=_first(round_), evidence={"count": number}, fix=fix, confidence=sure
    )


def _first(round_: Round) -> int:
    return 1 if round_.step <= ROUNDS_FIRST else 2


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in list(ranks)[:6])
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

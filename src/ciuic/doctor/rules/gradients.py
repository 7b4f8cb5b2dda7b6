"""Class C: gradients that are missing, zero or stale; and B4: parameters that do not move."""

from collections.abc import Iterable, Iterator

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts_model import (
    CUT,
    CUT_NAMES,
    IDLE_NAMES,
    OWNED,
    REENTRANT_NAMES,
    STALE,
    STALE_NAMES,
    STILL,
    STILL_OTHER,
    STILL_RATE,
    STILL_ROUNDING,
    THROWN,
)
from ciuic.doctor.facts_training import HALF
from ciuic.doctor.finding import Blind, Finding, Severity
from ciuic.doctor.record import Notice
from ciuic.doctor.rules.memory import Told, listed

THROWN_ROUNDS = 3
CUT_ROUNDS, STALE_ROUNDS, OTHER_ROUNDS, ROUNDING_ROUNDS, RATE_ROUNDS, IDLE_ROUNDS, HALF_ROUNDS = 2, 2, 2, 3, 3, 3, 2
"""Sampled steps in a row in which it must hold."""
RATE_STEP = 8
"""A group may have learning rate 0 in a warm-up."""
ZERO_SHARE, SMALL_SHARE, ALL_SHARE = 0.2, 0.5, 0.95
"""Of a float16 gradient: elements that are zero; of the others those below the smallest normal number."""
NAMES_MAX = 8


class Gradients(Rule):
    """From the counts of each record and the names to them."""

    def __init__(self) -> None:
        self._told = Told()
        self._runs: dict[tuple[int, str], tuple[int, int]] = {}
        self._names: dict[tuple[int, str], list[str]] = {}
        self._thrown_last: dict[int, int] = {}
        """By optimizer: passes thrown away before the last sampled step."""

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding | Blind]:
        """Names."""
        self._told.hear(notice)
        return ()

    def round(self, case: Case, round: Round) -> Iterable[Finding | Blind]:
        """Each kind by itself."""
        yield from self._cut(round)
        yield from self._stale(case, round)
        yield from self._still(round)
        yield from self._thrown(round)
        yield from self._underflow(round)

    def _in_a_row(self, round_: Round, what: str, holds: bool) -> tuple[int, int]:
        """How many sampled steps it has held by now, and since which step."""
        key = round_.optimizer, what
        count, since = self._runs.get(key, (0, round_.step))
        self._runs[key] = (count + 1, since if count else round_.step) if holds else (0, round_.step)
        return self._runs[key]

    def _lasting(self, round_: Round, what: str, ranks: list[int], count: int) -> list[str]:
        """Names that were told at each sampled step of the row."""
        now = self._told.names(what, round_.optimizer, ranks)
        before = self._names.get((round_.optimizer, what), []) if count > 1 else now
        self._names[round_.optimizer, what] = [name for name in before if name in now]
        return self._names[round_.optimizer, what]

    def _cut(self, round_: Round) -> Iterator[Finding]:
        values = round_.values(CUT)
        if not values:
            return
        ranks = list(values)
        for at, what in enumerate((CUT_NAMES, REENTRANT_NAMES)):
            count, since = self._in_a_row(round_, what, all(value[at] for value in values.values()))
            names = self._lasting(round_, what, ranks, count)
            if count < CUT_ROUNDS or not names:
                continue
            number = min(value[at] for value in values.values())
            inside = " inside a reentrant checkpoint whose inputs need no gradient" if what == REENTRANT_NAMES else ""
            cause = (
                f"{listed(names, count=number)} never gets a gradient, though its module is called in every forward "
                f"pass{inside}"
            )
            fix = "checkpoint(..., use_reentrant=False), or model.enable_input_require_grads()" if inside else ""
            yield Finding(
                code="CIUIC-C1",
                cause=cause,
                step=since,
                modules=tuple(names[:NAMES_MAX]),
                evidence={"parameters": number, "of": max((v[0] for v in round_.values(OWNED).values()), default=0)},
                confidence=0.9,
                fix=fix,
            )
        count, since = self._in_a_row(round_, IDLE_NAMES, all(value[2] for value in values.values()))
        names = self._lasting(round_, IDLE_NAMES, ranks, count)
        if count == IDLE_ROUNDS and names:
            cause = (
                f"{listed(names, count=min(v[2] for v in values.values()))}: trainable, but took no part in the "
                "first forward passes"
            )
            modules = tuple(names[:NAMES_MAX])
            yield Finding(
                code="CIUIC-C1", cause=cause, step=since, modules=modules, confidence=0.3, severity=Severity.NOTE
            )

    def _stale(self, case: Case, round_: Round) -> Iterator[Finding]:
        values = round_.values(STALE)
        every = bool(values) and len(values) == len(round_.records)
        names = self._told.names(STALE_NAMES, round_.optimizer, list(values))[:NAMES_MAX]
        count, since = self._in_a_row(round_, STALE, every and all(value[0] for value in values.values()))
        if count >= STALE_ROUNDS:
            cause = (
                f"gradients are not cleared between steps: from step {since} on each step uses the sum of all "
                "gradients before it"
            )
            yield Finding(code="CIUIC-C5", cause=cause, step=since, modules=tuple(names), confidence=0.95)
            return
        count, since = self._in_a_row(round_, "leak", every and all(value[1] for value in values.values()))
        if count >= STALE_ROUNDS and self._same_pace(case, round_, next(iter(values.values()))[2]):
            other = next(iter(values.values()))[2]
            cause = (
                f"the gradients that optimizer {round_.optimizer} uses hold what the backward pass for optimizer "
                f"{other} left in them: "
                f"they are not cleared before its own backward pass"
            )
            yield Finding(code="CIUIC-C5", cause=cause, step=since, modules=tuple(names), confidence=0.8)

    def _same_pace(self, case: Case, round_: Round, other: int) -> bool:
        """Two optimizers that step equally often; one that steps rarely accumulates on purpose."""
        steps = [step for optimizer, step in case.rounds if optimizer == other]
        return bool(steps) and abs(max(steps) - round_.step) <= max(1, round_.step // 4)

    def _thrown(self, round_: Round) -> Iterator[Finding]:
        values = round_.values(THROWN)
        counts = {int(value[0]) for value in values.values()}
        thrown = counts.pop() if len(values) == len(round_.records) and len(counts) == 1 else 0
        if thrown != self._thrown_last.get(round_.optimizer):
            self._in_a_row(round_, THROWN, False)  # begin anew
        self._thrown_last[round_.optimizer] = thrown
        count, since = self._in_a_row(round_, THROWN, thrown > 0)
        if not thrown or count != THROWN_ROUNDS:
            return
        _, where, none = next(iter(values.values()))
        if none:
            passes = "the backward pass" if thrown == 1 else f"all {thrown} backward passes"
            cause = f"{passes} of each step are lost" if thrown > 1 else f"{passes} of each step is lost"
            cause += f": gradients are cleared in {where}, and the optimizer's step has none"
        else:
            cause = (
                f"{thrown} of {thrown + 1} backward passes of each step are lost: gradients are cleared in {where} "
                "before the optimizer has used them"
            )
        yield Finding(
            code="CIUIC-C6",
            cause=cause,
            step=since,
            evidence={"backward_passes": thrown + 1 - none, "lost": thrown},
            confidence=0.95 if none else 0.8,
            severity=Severity.CRITICAL if none else None,
            fix="call optimizer.zero_grad() before the backward pass or after the step" if none else "",
        )

    def _still(self, round_: Round) -> Iterator[Finding]:
        values = round_.values(STILL)
        wanted = ((STILL_RATE, RATE_ROUNDS), (STILL_ROUNDING, ROUNDING_ROUNDS), (STILL_OTHER, OTHER_ROUNDS))
        for at, (what, rounds) in enumerate(wanted):
            holds = bool(values) and len(values) == len(round_.records) and all(value[at] for value in values.values())
            count, since = self._in_a_row(round_, what, holds)
            if count < rounds or (what == STILL_RATE and round_.step < RATE_STEP):
                continue
            ranks = list(values)
            names = self._told.names(what, round_.optimizer, ranks)
            number = max(value[at] for value in values.values())
            fact = {
                key: self._told.fact(what, round_.optimizer, ranks, key, 0)
                for key in ("rate", "dtype", "spacing", "of")
            }
            shown = listed(names, count=number)
            if what == STILL_RATE:
                cause, fix = (
                    f"{shown}: gradients come and nothing moves: learning rate of its group is 0 since step {since}",
                    "give the group a learning rate, or freeze it",
                )
            elif what == STILL_ROUNDING:
                cause = (
                    f"{shown}: gradients come and nothing moves: updates of about {fact['rate']:.1e} are smaller than "
                    "half the distance "
                    f"between two {fact['dtype']} numbers there, {fact['spacing']:.1e}, and round to nothing"
                )
                fix = "keep float32 weights (autocast computes in bfloat16), or a larger learning rate"
            else:
                cause, fix = (
                    f"{shown}: gradients come, the learning rate is {fact['rate']:.1e}, and the values do not change "
                    "in a step",
                    "",
                )
            evidence: dict[str, float | int | str] = {"still": number, "of": fact["of"], "learning_rate": fact["rate"]}
            confidence = {STILL_RATE: 0.8, STILL_ROUNDING: 0.9, STILL_OTHER: 0.85}[what]
            modules = tuple(names[:NAMES_MAX])
            yield Finding(
                code="CIUIC-B4",
                cause=cause,
                step=since,
                modules=modules,
                evidence=evidence,
                confidence=confidence,
                fix=fix,
            )

    def _underflow(self, round_: Round) -> Iterator[Finding]:
        values = round_.values(HALF)
        holds = bool(values) and all(map(_is_lost, values.values()))
        count, since = self._in_a_row(round_, HALF, holds)
        if count >= HALF_ROUNDS:
            share = max(value[0] for value in values.values())
            cause = (
                f"{share:.0%} of the gradient's elements are exactly zero: they were too small for float16, and "
                "there is no loss scale"
            )
            yield Finding(code="CIUIC-C3", cause=cause, step=since, evidence={"zero_share": share}, confidence=0.85)


def _is_lost(half: list[float]) -> bool:
    """Whether float16 was too small for a gradient, from facts_training.HALF."""
    zero, small = half[:2]
    return zero >= ALL_SHARE or (zero >= ZERO_SHARE and small >= SMALL_SHARE)

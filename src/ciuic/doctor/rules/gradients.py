"""Class C: gradients that are missing, zero or stale; and B4: parameters that do not move."""

from collections.abc import Iterable, Iterator

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts_model import (
    CUT,
    CUT_NAMES,
    IDLE_NAMES,
    MODEL,
    OWNED,
    REENTRANT_NAMES,
    STALE,
    STALE_NAMES,
    STILL,
    STILL_OTHER,
    STILL_RATE,
    STILL_ROUNDING,
)
from ciuic.doctor.facts_training import HALF
from ciuic.doctor.finding import Blind, Finding, Severity
from ciuic.doctor.record import Notice
from ciuic.doctor.rules.memory import Told, listed

CUT_ROUNDS, STALE_ROUNDS, OTHER_ROUNDS, ROUNDING_ROUNDS, RATE_ROUNDS, IDLE_ROUNDS, HALF_ROUNDS = 2, 2, 2, 3, 3, 3, 2
"""Sampled steps in a row in which it must hold."""
RATE_STEP = 8
"""A group may have learning rate 0 in a warm-up."""
ZERO_SHARE, SMALL_SHARE = 0.2, 0.5
"""Of a float16 gradient: elements that are zero; of the others those below the smallest normal number."""
NAMES_MAX = 8


class Gradients(Rule):
    """From the counts of each record and the names to them."""

    def __init__(self) -> None:
        self._told = Told()
        self._runs: dict[tuple[int, str], tuple[int, int]] = {}
        self._allows_unused = False

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding | Blind]:
        """Names."""
        self._told.hear(notice)
        if notice.kind == MODEL and notice.facts.get("find_unused_parameters"):
            self._allows_unused = True
        return ()

    def round(self, case: Case, round: Round) -> Iterable[Finding | Blind]:
        """Each kind by itself."""
        yield from self._cut(round)
        yield from self._stale(case, round)
        yield from self._still(round)
        yield from self._underflow(round)

    def _in_a_row(self, round: Round, what: str, holds: bool) -> tuple[int, int]:
        """How many sampled steps it has held by now, and since which step."""
        key = round.optimizer, what
        count, since = self._runs.get(key, (0, round.step))
        self._runs[key] = (count + 1, since if count else round.step) if holds else (0, round.step)
        return self._runs[key]

    def _cut(self, round: Round) -> Iterator[Finding]:
        values = round.values(CUT)
        if not values:
            return
        ranks = list(values)
        for at, what in enumerate((CUT_NAMES, REENTRANT_NAMES)):
            count, since = self._in_a_row(round, what, all(value[at] for value in values.values()))
            if count < CUT_ROUNDS:
                continue
            names = self._told.names(what, round.optimizer, ranks)
            number = max(value[at] for value in values.values())
            inside = " inside a reentrant checkpoint whose inputs need no gradient" if what == REENTRANT_NAMES else ""
            cause = f"{listed(names, count=number)} never gets a gradient, though its module is called in every forward pass{inside}"
            fix = "checkpoint(..., use_reentrant=False), or model.enable_input_require_grads()" if inside else ""
            yield Finding(
                code="CIUIC-C1",
                cause=cause,
                step=since,
                modules=tuple(names[:NAMES_MAX]),
                evidence={"parameters": number, "of": max((v[0] for v in round.values(OWNED).values()), default=0)},
                confidence=0.9,
                fix=fix,
            )
        count, since = self._in_a_row(round, IDLE_NAMES, all(value[2] for value in values.values()))
        if count == IDLE_ROUNDS:
            names = self._told.names(IDLE_NAMES, round.optimizer, ranks)
            cause = f"{listed(names, count=max(v[2] for v in values.values()))} is trainable but took no part in the first forward passes"
            modules = tuple(names[:NAMES_MAX])
            yield Finding(
                code="CIUIC-C1", cause=cause, step=since, modules=modules, confidence=0.3, severity=Severity.NOTE
            )

    def _stale(self, case: Case, round: Round) -> Iterator[Finding]:
        values = round.values(STALE)
        every = bool(values) and len(values) == len(round.records)
        names = self._told.names(STALE_NAMES, round.optimizer, list(values))[:NAMES_MAX]
        count, since = self._in_a_row(round, STALE, every and all(value[0] for value in values.values()))
        if count >= STALE_ROUNDS:
            cause = f"gradients are not cleared between steps: from step {since} on each step uses the sum of all gradients before it"
            yield Finding(code="CIUIC-C5", cause=cause, step=since, modules=tuple(names), confidence=0.95)
            return
        count, since = self._in_a_row(round, "leak", every and all(value[1] for value in values.values()))
        if count >= STALE_ROUNDS and self._same_pace(case, round, next(iter(values.values()))[2]):
            other = next(iter(values.values()))[2]
            cause = (
                f"the gradients that optimizer {round.optimizer} uses hold what the backward pass for optimizer {other} left in them: "
                f"they are not cleared before its own backward pass"
            )
            yield Finding(code="CIUIC-C5", cause=cause, step=since, modules=tuple(names), confidence=0.8)

    def _same_pace(self, case: Case, round: Round, other: int) -> bool:
        """Two optimizers that step equally often; one that steps rarely accumulates on purpose."""
        steps = [step for optimizer, step in case.rounds if optimizer == other]
        return bool(steps) and abs(max(steps) - round.step) <= max(1, round.step // 4)

    def _still(self, round: Round) -> Iterator[Finding]:
        values = round.values(STILL)
        wanted = ((STILL_RATE, RATE_ROUNDS), (STILL_ROUNDING, ROUNDING_ROUNDS), (STILL_OTHER, OTHER_ROUNDS))
        for at, (what, rounds) in enumerate(wanted):
            holds = bool(values) and len(values) == len(round.records) and all(value[at] for value in values.values())
            count, since = self._in_a_row(round, what, holds)
            if count < rounds or (what == STILL_RATE and round.step < RATE_STEP):
                continue
            ranks = list(values)
            names = self._told.names(what, round.optimizer, ranks)
            number = max(value[at] for value in values.values())
            fact = {
                key: self._told.fact(what, round.optimizer, ranks, key, 0) for key in ("rate", "dtype", "spacing", "of")
            }
            shown = listed(names, count=number)
            if what == STILL_RATE:
                cause, fix = (
                    f"{shown} gets gradients but does not move: the learning rate of its group is 0 since step {since}",
                    "give the group a learning rate, or freeze it",
                )
            elif what == STILL_ROUNDING:
                cause = (
                    f"{shown} gets gradients but does not move: updates of about {fact['rate']:.1e} are smaller than half the distance "
                    f"between two {fact['dtype']} numbers there, {fact['spacing']:.1e}, and round to nothing"
                )
                fix = "keep float32 weights (autocast computes in bfloat16), or a larger learning rate"
            else:
                cause, fix = (
                    f"{shown} gets gradients and has learning rate {fact['rate']:.1e}, but its values do not change in a step",
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

    def _underflow(self, round: Round) -> Iterator[Finding]:
        values = round.values(HALF)
        holds = bool(values) and all(value[0] >= ZERO_SHARE and value[1] >= SMALL_SHARE for value in values.values())
        count, since = self._in_a_row(round, HALF, holds)
        if count >= HALF_ROUNDS:
            share = max(value[0] for value in values.values())
            cause = f"{share:.0%} of the gradient's elements are exactly zero: they were too small for float16, and there is no loss scale"
            yield Finding(code="CIUIC-C3", cause=cause, step=since, evidence={"zero_share": share}, confidence=0.85)

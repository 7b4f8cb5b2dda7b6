"""Class B without movement: does the optimizer own the model?"""

from collections.abc import Iterable

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts_model import FROZEN, NAMES, OWNED, SHARED, STRANGERS, UNOWNED
from ciuic.doctor.finding import Blind, Finding
from ciuic.doctor.record import Notice
from ciuic.doctor.rules.memory import Told, listed

ROUNDS = 2
"""Sampled steps in which it must hold: optimizers may come later than the first step."""
NAMES_MAX = 8
TRAINABLE, WITHOUT, ZERO, LOOSE, STRANGE, TWICE = range(6)


class Ownership(Rule):
    """From OWNED and the names to it."""

    def __init__(self) -> None:
        self._told = Told()
        self._seen: dict[tuple[int, str], int] = {}

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding | Blind]:
        """Shared parameters are told when they are seen."""
        self._told.hear(notice)
        facts = notice.facts
        if notice.kind == NAMES and facts.get("what") == SHARED and facts.get("count"):
            yield self._shared(notice)

    def round(self, case: Case, round: Round) -> Iterable[Finding | Blind]:
        """What no optimizer owns, and what the optimizer owns that is no model's."""
        yield from self._frozen(round)
        values = round.values(OWNED)
        if not values:
            return
        loose = tuple(rank for rank, value in values.items() if value[LOOSE])
        twice = tuple(rank for rank, value in values.items() if value[TWICE])
        if self._count(round, "twice", bool(twice)) >= ROUNDS:
            number = max(values[rank][TWICE] for rank in twice)
            cause = (
                f"{number} parameters are twice in the groups of optimizer {round.optimizer}: each of its steps "
                "moves them twice"
            )
            yield Finding(code="CIUIC-B3", cause=cause, step=1, confidence=0.9)
        if self._count(round, "loose", bool(loose)) >= ROUNDS:
            yield self._loose(round, values, loose, everywhere=len(loose) == len(values))

    def _frozen(self, round_: Round) -> Iterable[Finding]:
        values = round_.values(FROZEN)
        if self._count(round_, "frozen", bool(values)) != 1:
            return
        names = self._told.names(FROZEN, round_.optimizer, values)
        yield Finding(
            code="CIUIC-B5",
            cause=f"{listed(names, count=max(values.values()))} need no gradient, but optimizer "
            f"{round_.optimizer} still moves them: a gradient from before is left, "
            "or zeros to which weight decay and momentum are added",
            step=round_.step,
            ranks=() if len(values) == len(round_.records) else tuple(values),
            modules=tuple(names[:NAMES_MAX]),
            evidence={"parameters": max(values.values())},
            confidence=0.9,
        )

    def _count(self, round_: Round, what: str, holds: bool) -> int:
        """Sampled steps in a row at which it holds."""
        key = round_.optimizer, what
        self._seen[key] = self._seen.get(key, 0) + 1 if holds else 0
        return self._seen[key]

    def _loose(
        self, round_: Round, values: dict[int, list[int]], ranks: tuple[int, ...], *, everywhere: bool
    ) -> Finding:
        names = self._told.names(UNOWNED, round_.optimizer, ranks)
        same = self._told.names(STRANGERS, round_.optimizer, ranks)
        count = max(values[rank][LOOSE] for rank in ranks)
        strangers = max(values[rank][STRANGE] for rank in ranks)
        trainable = max(values[rank][TRAINABLE] for rank in ranks)
        shown = () if everywhere else ranks
        evidence: dict[str, float | int | str] = {"unowned": count, "owned": trainable, "strangers": strangers}
        if strangers:
            first = [*same, *(name for name in names if name not in same)]
            what = "all" if strangers == trainable else f"{strangers} of the {trainable}"
            cause = (
                f"the optimizer holds tensors that the trained model does not use ({what} of its parameters get no "
                "gradient), and "
                f"nobody owns {listed(first, count=count)}, which get gradients: the model was copied, converted or "
                "changed after "
                f"the optimizer was built"
            )
            modules = tuple(first[:NAMES_MAX])
            return Finding(
                code="CIUIC-B2", cause=cause, step=1, ranks=shown, modules=modules, evidence=evidence, confidence=0.95
            )
        cause = f"{listed(names, count=count)} get gradients, but no optimizer owns them: they never move"
        modules = tuple(names[:NAMES_MAX])
        return Finding(
            code="CIUIC-B1", cause=cause, step=1, ranks=shown, modules=modules, evidence=evidence, confidence=0.9
        )

    def _shared(self, notice: Notice) -> Finding:
        facts = notice.facts
        same = bool(facts.get("same"))
        how = "both step with the same gradients" if same else "both step, with moments of their own"
        mine, other = facts.get("optimizer"), facts.get("other")
        first, second = sorted((int(mine or 0), int(other or 0)))
        cause = f"{listed(facts['names'], count=facts['count'])} belong to optimizers {first} and {second}: {how}"
        modules = tuple(facts["names"][:NAMES_MAX])
        return Finding(code="CIUIC-B3", cause=cause, step=1, modules=modules, confidence=0.9 if same else 0.75)

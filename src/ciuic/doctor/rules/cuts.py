"""C2: a collective without gradient cuts the graph. A7: every micro-batch is reduced although no_sync was meant."""

from collections.abc import Iterable

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts_model import CUT_CALL, FLOW
from ciuic.doctor.finding import Blind, Finding
from ciuic.doctor.record import Notice
from ciuic.doctor.rules.unsynchronised import NO_SYNC, SYNCED, THROUGH

TIMES = 2
"""Sampled steps, or ranks, at which it must be seen."""
FIXES = {
    "all_gather": "torch.distributed.nn.functional.all_gather(x) instead of dist.all_gather: it carries the gradient",
    "all_to_all": "torch.distributed.nn.functional.all_to_all_single(...) instead of dist.all_to_all_single: it "
    "carries the gradient",
}


class Cuts(Rule):
    """By call site."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], set[tuple[int, int]]] = {}
        self._rounds: dict[int, int] = {}

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding | Blind]:
        """The same site, seen again."""
        if notice.kind != CUT_CALL:
            return
        facts = notice.facts
        call, site = str(facts.get("call")), str(facts.get("site"))
        seen = self._seen.setdefault((site, str(facts.get("how"))), set())
        seen.add((notice.rank, notice.step))
        if len(seen) < TIMES:
            return
        shape = "x".join(map(str, facts.get("shape", ())))
        if facts.get("how") == "unreachable":
            what = (
                f"the gradient of the {shape} tensor it is given is lost: there is no way from it to the loss any more"
            )
        else:
            what = (
                f"the rows of other ranks come back as constants: the {shape} tensor it is given gets part of its "
                "gradient only"
            )
        fix = next((text for name, text in FIXES.items() if call.startswith(name)), "")
        yield Finding(
            code="CIUIC-C2",
            cause=f"dist.{call} at {site} carries no gradient: {what}",
            step=1 + min(step for _, step in seen),
            modules=(str(facts["module"]),) if facts.get("module") else (),
            evidence={"call": call, "site": site},
            confidence=0.9 if facts.get("how") == "unreachable" else 0.75,
            fix=fix,
        )

    def round(self, case: Case, round: Round) -> Iterable[Finding | Blind]:
        """no_sync was entered, and yet each pass was reduced."""
        values = round.values(FLOW)
        if not values or not all(v[NO_SYNC] and v[THROUGH] > 1 and v[SYNCED] == v[THROUGH] for v in values.values()):
            self._rounds[round.optimizer] = 0
            return
        self._rounds[round.optimizer] = self._rounds.get(round.optimizer, 0) + 1
        if self._rounds[round.optimizer] >= TIMES:
            first = next(iter(values.values()))
            cause = (
                f"no_sync() was entered {first[NO_SYNC]} times a step, but all {first[THROUGH]} micro-batches were "
                "reduced: DDP looks at "
                f"it in the forward pass, and that was outside"
            )
            evidence: dict[str, float | int | str] = {"micro_batches": first[THROUGH], "reduced": first[SYNCED]}
            yield Finding(code="CIUIC-A7", cause=cause, step=1, evidence=evidence, confidence=0.95)

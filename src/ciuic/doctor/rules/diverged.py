"""Why parameters differ although gradients were equal. Pure."""

from typing import Any

from ciuic.doctor.case import odd_ones
from ciuic.doctor.facts import PARAMETERS
from ciuic.doctor.facts_model import OPTIMIZER_STATE, WRITTEN
from ciuic.doctor.facts_training import HYPER, RATES
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.rules.distance import Distance, farthest
from ciuic.doctor.rules.memory import listed
from ciuic.doctor.rules.view import View

TAKEN = "taken"
ULP = 2e-6
"""Relative distance that other processors may cause by themselves."""
FEW_SHARE = 0.34
NAMES_MAX = 8


def at_start(view: View, names: list[str]) -> Finding:
    """Parameters of the first step differ."""
    far = _far(view, names)
    count = max(len(names), 1)
    evidence: dict[str, float | int | str] = {"differing_tensors": count}
    severity, confidence, apart = None, 0.9, ""
    if far is not None:
        evidence["relative_distance"] = far[1].relative
        apart = f", relative distance {far[1].relative:.1e} in {far[0]}"
        if far[1].relative < ULP:
            severity, confidence = Severity.NOTE, 0.3
    cause = (
        f"the ranks began with different parameters: {listed(names) or 'the model'} differ before step "
        f"{view.step}{apart}"
    )
    return Finding(
        code="CIUIC-D1",
        cause=cause,
        step=view.step,
        ranks=view.odd(PARAMETERS),
        modules=tuple(names[:NAMES_MAX]),
        evidence=evidence,
        confidence=confidence,
        severity=severity,
    )


def later(view: View, before: View | None, *, total: int) -> Finding:
    """Parameters differ at a later step. `before` is the last one at which they were equal, `total` the number of
    tensors."""
    return evident(view, before) or _unknown(view, before, view.names(PARAMETERS), total)


def evident(view: View, before: View | None) -> Finding | None:
    """The finding where something was seen that moves parameters apart."""
    names = view.names(PARAMETERS)
    return _written(view, before, names) or _numbers(view, names) or _steps(view, names) or _state(view, before, names)


def _finding(view: View, code: str, cause: str, names: list[str], **more: Any) -> Finding:
    evidence: dict[str, float | int | str] = {"differing_tensors": len(names)}
    far = _far(view, names)
    if far is not None:
        evidence["relative_distance"] = far[1].relative
    more.setdefault("ranks", view.odd(PARAMETERS))
    more.setdefault("step", view.step)
    return Finding(code=code, cause=cause, modules=tuple(names[:NAMES_MAX]), evidence=evidence, **more)


def written_by_rank(view: View, before: View | None) -> dict[int, tuple[dict[str, None], int, str]]:
    """By rank: names that were written to between the two sampled steps, the step before which, and by what."""
    since = before.step if before is not None else 0
    found: dict[int, tuple[dict[str, None], int, str]] = {}
    for rank, facts in view.told.all:
        number = int(facts.get("number", 0))
        if facts.get("what") != WRITTEN or rank not in view.ranks or facts.get("optimizer") != view.optimizer:
            continue
        if since < number <= view.step:
            names, first, by = found.get(rank, ({}, number, str(facts.get("by", ""))))
            found[rank] = {**names, **dict.fromkeys(facts["names"])}, first, by
    return found


def _written(view: View, before: View | None, names: list[str]) -> Finding | None:
    wrote = {r: w for r, w in written_by_rank(view, before).items() if not names or set(w[0]) & set(names)}
    if not wrote:
        return None
    ranks = tuple(wrote)
    written, step, by = wrote[ranks[0]]
    those = [name for name in written if not names or name in names]
    by = f" (by {by})" if by else ""
    if len(ranks) == len(view.ranks):
        cause = (
            f"{listed(those)} was written to outside the optimizer before step {step}{by}, on each rank another value"
        )
        return _finding(view, "CIUIC-D4", cause, those, ranks=(), confidence=0.8, step=step)
    cause = (
        f"{listed(those)} was written to outside the optimizer before step {step}{by}, on rank "
        f"{listed(map(str, ranks))} only"
    )
    return _finding(view, "CIUIC-D4", cause, those, step=step, ranks=ranks, confidence=0.95)


def _numbers(view: View, names: list[str]) -> Finding | None:
    for fact, what in ((RATES, "learning rates"), (HYPER, "hyperparameters")):
        values = view.values(fact)
        odd = odd_ones(values)
        if odd:
            shown = f" ({values[odd[0]]} there)" if fact == RATES else ""
            cause = (
                f"the optimizer of rank {listed(map(str, odd))} has other {what}{shown}: equal gradients move its "
                "parameters elsewhere"
            )
            return _finding(view, "CIUIC-D2", cause, names, ranks=odd, confidence=0.85)
    return None


def _steps(view: View, names: list[str]) -> Finding | None:
    values = view.values(TAKEN)
    odd = odd_ones(values)
    if not odd:
        return None
    usual = next(value for rank, value in values.items() if rank not in odd)
    cause = f"rank {listed(map(str, odd))} has made {values[odd[0]]} optimizer steps where the others have made {usual}"
    return _finding(view, "CIUIC-D2", cause, names, ranks=odd, confidence=0.8)


def _state(view: View, before: View | None, names: list[str]) -> Finding | None:
    odd = odd_ones((before or view).values(OPTIMIZER_STATE))
    if not odd:
        return None
    cause = (
        f"the optimizer's state of rank {listed(map(str, odd))} is another one at step {(before or view).step}: "
        "equal gradients "
        f"move its parameters elsewhere"
    )
    return _finding(view, "CIUIC-D2", cause, names, ranks=odd, confidence=0.85)


def _unknown(view: View, before: View | None, names: list[str], total: int) -> Finding:
    far = _far(view, names)
    if far is not None and far[1].relative < ULP:
        cause = f"parameters are not bitwise equal, relative distance {far[1].relative:.1e} in {far[0]}"
        return _finding(view, "CIUIC-D2", cause, [far[0]], ranks=(), confidence=0.2, severity=Severity.NOTE)
    since = f"since step {before.step}" if before is not None else "by now"
    if names and len(names) <= max(1, int(FEW_SHARE * total)):
        cause = (
            f"{listed(names)} differs between ranks {since} although gradients, state and hyperparameters are equal: "
            "something "
            f"other than the optimizer wrote to it"
        )
        return _finding(view, "CIUIC-D4", cause, names, confidence=0.6)
    cause = f"parameters ({listed(names) or 'all'}) differ between ranks {since} although the gradients are equal"
    return _finding(view, "CIUIC-D2", cause, names, confidence=0.5)


def _far(view: View, names: list[str]) -> tuple[str, Distance] | None:
    return farthest(view.sketches.get(PARAMETERS, {}), names)

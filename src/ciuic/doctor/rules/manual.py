"""Loops without a wrapper: what the program means is inferred from what it exchanges. Pure."""

from collections.abc import Sequence

from ciuic.doctor.facts import GRADIENTS, PARAMETERS
from ciuic.doctor.facts_model import AFTER_STEP, OWNED, ZERO_GRADIENT
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.rules.distance import farthest
from ciuic.doctor.rules.memory import listed
from ciuic.doctor.rules.unsynchronised import BACKWARDS, by_distance, zero_somewhere
from ciuic.doctor.rules.view import View

FORGOTTEN_STEPS = 16
"""A program whose ranks began equal and have exchanged nothing for so many steps has forgotten it, or never wanted "
"to."""
FORGOTTEN_AT_END = 8
NAMES_MAX = 8


def is_synchronous(views: Sequence[View]) -> bool:
    """Whether gradients were exchanged, and that made at least some of them equal."""
    return any(view.exchange(0) and (not view.grads_differ or _equal_gradients(view) > 0) for view in views)


def why_differs(view: View, views: Sequence[View], *, final: bool) -> Finding | None:
    """Gradients differ at this step; None: that is how it is meant, or not to be told yet."""
    late = next((value for each in views for value in each.values(AFTER_STEP).values()), None)
    if late is not None and not any(each.exchange(0) for each in views):
        return _after_step(view, str(late[1]))
    if view.exchange(0):
        return _exchanged(view, views)
    if any(each.exchange(2) for each in views):
        return None  # parameters are averaged: local steps in between
    if any(not each.grads_differ and each.exchange(0) for each in views):
        return _left_out(view, views)
    return _forgotten(views, final=final)


def beside_shards(view: View, views: Sequence[View]) -> Finding | None:
    """Parameters that are no shards, or replicas of shards, whose gradients differ."""
    started = set(views[0].names(PARAMETERS)) if views[0].params_differ else set()
    names = [name for name in view.differing_gradients if name not in started]
    if not names:
        return None
    cause = (
        f"{listed(names)} is on every rank as a whole beside the shards, and nobody reduces its gradient: it differs "
        "between "
        f"ranks at step {view.step}"
    )
    fix = "let fully_shard manage it, or reduce its gradient before the step"
    modules = tuple(names[:NAMES_MAX])
    return Finding(code="CIUIC-A2", cause=cause, step=view.step, modules=modules, confidence=0.85, fix=fix)


def after_average(view: View, views: Sequence[View]) -> Finding | None:
    """Parameters differ right after they were exchanged. Only when most of them are equal is that a mistake."""
    names = view.names(PARAMETERS)
    started = set(views[0].names(PARAMETERS)) if views[0].params_differ else set()
    names = [name for name in names if name not in started]
    if not names or not view.equal.get(PARAMETERS):
        return None
    cause = (
        f"the exchange of parameters before step {view.step} left out {listed(names)}: they differ between ranks, "
        "the others are equal"
    )
    fix = "average every parameter: for p in model.parameters(): dist.all_reduce(p.data)"
    return _finding(view, cause, names, confidence=0.85, fix=fix)


def became_equal(views: Sequence[View]) -> bool:
    """Whether an exchange of parameters has made equal what began different: then it was meant to be equal."""
    return any(view.exchange(3) and not view.params_differ for view in views[1:])


def _after_step(view: View, where: str) -> Finding:
    cause = (
        f"gradients are reduced in {where} after the optimizer's step: the step itself used each rank's own, which "
        "differ, and what was reduced is cleared"
    )
    fix = "reduce the gradients between the backward pass and optimizer.step()"
    return _finding(view, cause, view.differing_gradients, confidence=0.9, fix=fix)


def _exchanged(view: View, views: Sequence[View]) -> Finding | None:
    names = view.differing_gradients
    if view.none_somewhere:
        name, without = next(iter(view.none_somewhere.items()))
        ranks = listed(map(str, without))
        cause = (
            f"{name} has no gradient on rank {ranks}, but one on the other ranks, at step {view.step}: what is there "
            "was reduced"
        )
        return Finding(
            code="CIUIC-C4",
            cause=cause,
            step=view.step,
            ranks=without,
            modules=tuple(view.none_somewhere)[:NAMES_MAX],
            confidence=0.85,
        )
    experts = set(views[0].names(PARAMETERS)) if views[0].params_differ else set()
    if names and set(names) <= experts:
        return None  # they began different and stay so: experts of their own on each rank
    names = [name for name in names if name not in experts]
    if view.exchange(1):
        backwards = max(view.flow(BACKWARDS).values(), default=0)
        cause = (
            f"gradients were reduced at step {view.step}, then another of its {backwards} backward passes added to "
            "them: what the "
            f"optimizer got differs between ranks"
        )
        return _finding(view, cause, names, confidence=0.9, fix="reduce once, after the last backward pass")
    zero = zero_somewhere(view)
    if zero is not None and len(names) <= 2:
        name, ranks = zero
        cause = (
            f"the gradient of {name} is exactly zero on rank {listed(map(str, ranks))} only, at step {view.step}, "
            "after the reduction"
        )
        return Finding(code="CIUIC-A6", cause=cause, step=view.step, ranks=ranks, modules=(name,), confidence=0.7)
    far = farthest(view.sketches.get(GRADIENTS, {}), names)
    damage = by_distance(view, far, names) if far is not None else None
    if damage is not None and (damage.code == "CIUIC-D5" or damage.severity is Severity.NOTE):
        return damage
    equal = _equal_gradients(view)
    if equal > 0 or not names:
        cause = (
            f"the program's reduction leaves out {listed(names) or 'some parameters'}: these gradients differ "
            f"between ranks at step {view.step}, {equal} others are equal"
        )
        return _finding(view, cause, names, confidence=0.9)
    if damage is not None:
        return damage
    cause = (
        f"the program exchanges gradients, but all of them differ between ranks at step {view.step}: the result is "
        "not used"
    )
    return _finding(view, cause, names, confidence=0.6)


def _left_out(view: View, views: Sequence[View]) -> Finding:
    steps = [each.step for each in views if each.grads_differ and not each.exchange(0)]
    cause = (
        f"gradients were reduced at other steps, but not at step {listed(map(str, steps))}: they differ between "
        "ranks there"
    )
    return _finding(view, cause, view.names(GRADIENTS), confidence=0.85)


def _forgotten(views: Sequence[View], *, final: bool) -> Finding | None:
    last = views[-1]
    first = views[0]
    if first.params_differ or not last.params_differ or first.step > 1:
        return None
    if last.step < (FORGOTTEN_AT_END if final else FORGOTTEN_STEPS) or not all(each.grads_differ for each in views):
        return None
    far = farthest(last.sketches.get(PARAMETERS, {}), last.names(PARAMETERS))
    evidence: dict[str, float | int | str] = {"steps": last.step}
    if far is not None:
        evidence["relative_distance"] = far[1].relative
    cause = (
        f"{len(last.ranks)} ranks began with equal parameters and have exchanged neither gradients nor parameters in "
        f"{last.step} steps: each trains a model of its own"
    )
    return Finding(
        code="CIUIC-A5",
        cause=cause,
        step=first.step,
        modules=tuple(last.names(PARAMETERS)[:NAMES_MAX]),
        evidence=evidence,
        confidence=0.6,
        severity=Severity.WARNING,
        fix="wrap the model: model = DistributedDataParallel(model), or reduce the gradients before each step",
    )


def _equal_gradients(view: View) -> int:
    """Gradients that are there, not zero, and not among those that differ."""
    if not view.leaves.get(GRADIENTS):
        return view.equal.get(GRADIENTS, 0)
    owned = next(iter(view.values(OWNED).values()), [0, 0])
    zero = len(view.told_names(ZERO_GRADIENT))
    return max(0, int(owned[0]) - int(owned[1]) - zero - len(view.differing_gradients))


def _finding(view: View, cause: str, names: list[str], *, confidence: float, fix: str = "") -> Finding:
    evidence: dict[str, float | int | str] = {"differing_tensors": len(names)}
    far = farthest(view.sketches.get(GRADIENTS, {}), names)
    if far is not None:
        evidence["relative_distance"] = far[1].relative
    modules = tuple(names[:NAMES_MAX])
    return Finding(
        code="CIUIC-A5", cause=cause, step=view.step, modules=modules, evidence=evidence, confidence=confidence, fix=fix
    )

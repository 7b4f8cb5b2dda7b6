"""Why gradients differ under DistributedDataParallel: which of its conditions was not kept. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from ciuic.doctor.facts import GRADIENTS
from ciuic.doctor.facts_model import UNREGISTERED, UNTOUCHED, WITHOUT_GRADIENT, ZERO_GRADIENT
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.rules.distance import Distance, farthest
from ciuic.doctor.rules.memory import listed
from ciuic.doctor.rules.view import SAME_UP_TO_FACTOR, View

BACKWARDS, FORWARDS, THROUGH, SYNCED, LAST, NO_SYNC = range(6)
SPARSE_SHARE = 0.25
"""Of a tensor's blocks: fewer differing ones are damage, not a missing reduction."""
TINY = 1e-6
NAMES_MAX = 8
Options = Mapping[str, Any]


def why_differs(view: View, options: Options, *, started: Collection[str], local_is_possible: bool) -> Finding | None:
    """The finding for a step whose gradients differ. `options` are those of the wrapper. With `local_is_possible` a
    program that never reduces may still average parameters later: then None. `started` are the names that differed
    before the first step: when DDP does not know them they are each rank's own, experts say."""
    names = view.differing_gradients
    unregistered = set(view.told_names(UNREGISTERED))
    own = unregistered & set(started)
    if names and set(names) <= own:
        return None
    names = [name for name in names if name not in own]
    outside = set(names) & unregistered
    hooks_lost = "hooks lost" in (view.told.fact(UNREGISTERED, view.optimizer, view.ranks, "how") or ())
    around = [rank for rank, count in view.flow(THROUGH).items() if count == 0 and view.flow(BACKWARDS).get(rank)]
    if view.none_somewhere and not around:
        return _none_somewhere(view)
    if around:
        return _around(view, names, around)
    if hooks_lost:
        return _hooks_lost(view, names)
    if outside and len(outside) == len(names):
        return _not_registered(view, names)
    if not all(view.flow(LAST).values()) and view.flow(LAST):
        never = not any(view.flow(SYNCED).values())
        return None if never and local_is_possible else _no_sync(view, names)
    missing = [name for name in view.told_names(WITHOUT_GRADIENT) if name not in unregistered]
    if missing and not options.get("find_unused_parameters"):
        return _unused(view, names, missing)
    if names and set(names) <= set(view.told_names(UNTOUCHED)):
        return _early_only(view, names)
    if outside:  # those that it does reduce wait for what is not there any more
        return _not_registered(view, sorted(outside))
    if _forwards(view) > _through(view):
        return _partly_around(view, names)
    return _by_numbers(view, names, options)


def _finding(view: View, code: str, cause: str, modules: list[str], **more: Any) -> Finding:
    evidence = {"differing_tensors": len(view.names(GRADIENTS)), **more.pop("evidence", {})}
    return Finding(
        code=code, cause=cause, step=view.step, modules=tuple(modules[:NAMES_MAX]), evidence=evidence, **more
    )


def _forwards(view: View) -> int:
    return max(view.flow(FORWARDS).values(), default=0)


def _through(view: View) -> int:
    return max(view.flow(THROUGH).values(), default=0)


def _around(view: View, names: list[str], around: list[int]) -> Finding:
    forwards = _forwards(view)
    some = "" if len(around) == len(view.ranks) else f" on rank {listed(map(str, around))}"
    if forwards:
        passes = f"{forwards} forward pass{'es' if forwards != 1 else ''}"
        how = f"{passes}{some} went to the wrapped module itself, none through DistributedDataParallel"
    else:
        how = f"gradients came{some} without a forward pass through DistributedDataParallel or its module"
    cause = f"{how}, so nothing was reduced: the gradients of step {view.step} differ between ranks"
    ranks = () if len(around) == len(view.ranks) else tuple(around)
    evidence = {"forwards": forwards, "forwards_through_wrapper": 0}
    return _finding(view, "CIUIC-A1", cause, names, ranks=ranks, confidence=0.95, evidence=evidence)


def _partly_around(view: View, names: list[str]) -> Finding:
    forwards, through = _forwards(view), _through(view)
    cause = (
        f"{forwards - through} of {forwards} forward passes of step {view.step} went around DistributedDataParallel, "
        "and the "
        f"gradients differ between ranks"
    )
    evidence = {"forwards": forwards, "forwards_through_wrapper": through}
    return _finding(view, "CIUIC-A1", cause, names, confidence=0.75, evidence=evidence)


def _hooks_lost(view: View, names: list[str]) -> Finding:
    count = view.told.count(UNREGISTERED, view.optimizer, view.ranks)
    cause = (
        f"{count} parameters were converted or moved after DistributedDataParallel was built: its hooks are gone, "
        f"it reduces none of them, and the gradients of step {view.step} differ"
    )
    fix = "convert and move the model first (model.to(...)), then wrap it"
    return _finding(view, "CIUIC-A2", cause, names or view.told_names(UNREGISTERED), fix=fix, confidence=0.9)


def _not_registered(view: View, names: list[str]) -> Finding:
    how = list(view.told.fact(UNREGISTERED, view.optimizer, view.ranks, "how") or ())
    count = max(view.told.count(UNREGISTERED, view.optimizer, view.ranks), len(names))
    if how == ["ignored"]:
        cause = (
            f"DistributedDataParallel was told to ignore {listed(names, count=count)}: their gradients differ "
            "between ranks"
        )
        fix = "take them off the list of ignored parameters, or reduce them yourself"
        return _finding(view, "CIUIC-A2", cause, names, fix=fix, confidence=0.95)
    if how == ["beside"]:
        cause = (
            f"{listed(names, count=count)}: trained by the same optimizer, but in no DistributedDataParallel, and "
            "nobody reduces the gradients: they differ between ranks"
        )
        fix = "wrap that module too, or make it part of the wrapped one"
        return _finding(view, "CIUIC-A2", cause, names, fix=fix, confidence=0.9)
    did = "added" if "added" in how else "unfrozen"
    cause = (
        f"{listed(names, count=count)}: {did} after DistributedDataParallel had registered what is trainable; their "
        "gradients "
        f"are not reduced and differ"
    )
    return _finding(view, "CIUIC-A3", cause, names, confidence=0.95)


def _no_sync(view: View, names: list[str]) -> Finding:
    forwards, synced = _forwards(view), max(view.flow(SYNCED).values(), default=0)
    cause = (
        f"the last micro-batch of step {view.step} ran under no_sync(): {synced} of {forwards} passes were reduced, "
        "and the "
        f"gradients the optimizer got differ between ranks"
    )
    evidence = {"micro_batches": forwards, "reduced": synced}
    return _finding(view, "CIUIC-A4", cause, names, confidence=0.95, evidence=evidence)


def _unused(view: View, names: list[str], missing: list[str]) -> Finding:
    count = view.told.count(WITHOUT_GRADIENT, view.optimizer, view.ranks)
    cause = (
        f"{listed(missing, count=count)} took no part in the loss of step {view.step}, so buckets were never "
        "complete and the "
        f"gradients in them were not reduced: they differ between ranks"
    )
    evidence = {"parameters_without_gradient": count}
    return _finding(view, "CIUIC-A2", cause, missing, confidence=0.95, evidence=evidence)


def _early_only(view: View, names: list[str]) -> Finding:
    backwards = max(view.flow(BACKWARDS).values(), default=0)
    cause = (
        f"{listed(names)} got gradients in an earlier of the {backwards} micro-batches of step {view.step} only; the "
        "reduction "
        f"after the last one left them out, and they differ between ranks"
    )
    code = "CIUIC-A4" if backwards > 1 else "CIUIC-A2"
    return _finding(view, code, cause, names, confidence=0.9, evidence={"micro_batches": backwards})


def _none_somewhere(view: View) -> Finding:
    names = list(view.none_somewhere)
    without = view.none_somewhere[names[0]]
    cause = (
        f"{listed(names)} has no gradient on rank {listed(map(str, without))}, but one on the other ranks, at step "
        f"{view.step}"
    )
    return _finding(view, "CIUIC-C4", cause, names, ranks=without, confidence=0.85)


def zero_somewhere(view: View) -> tuple[str, tuple[int, ...]] | None:
    """A differing gradient that is exactly zero on some ranks only, and these ranks."""
    told = view.told.by_rank(ZERO_GRADIENT, view.optimizer, view.ranks)
    for name in view.names(GRADIENTS):
        ranks = tuple(rank for rank, names in told.items() if name in names)
        if ranks and len(ranks) < len(view.ranks):
            return name, ranks
    return None


def _by_numbers(view: View, names: list[str], options: Options) -> Finding:
    zero = zero_somewhere(view)
    if zero is not None:
        name, ranks = zero
        cause = (
            f"the gradient of {name} is exactly zero on rank {listed(map(str, ranks))} only, at step {view.step}: "
            "something wrote to it after the reduction"
        )
        return _finding(view, "CIUIC-A6", cause, [name], ranks=ranks, confidence=0.8)
    far = farthest(view.sketches.get(GRADIENTS, {}), names)
    if far is not None:
        found = by_distance(view, far, names)
        if found is not None:
            return found
    if options.get("static_graph"):
        cause = (
            f"static_graph=True, but the graph of step {view.step} is not that of the first: {listed(names)} differ "
            "between ranks"
        )
        return _finding(view, "CIUIC-A2", cause, names, confidence=0.8)
    cause = (
        f"the gradients of {listed(names) or 'the model'} differ between ranks at step {view.step}, after the reduction"
    )
    evidence = {} if far is None else {"relative_distance": far[1].relative}
    return _finding(view, "CIUIC-A6", cause, names, ranks=view.odd(GRADIENTS), confidence=0.55, evidence=evidence)


def by_distance(view: View, far: tuple[str, Distance], names: list[str]) -> Finding | None:
    """What the size and the shape of the difference say; None: nothing."""
    name, apart = far
    evidence = {"relative_distance": apart.relative, "share_of_blocks": apart.blocks_share}
    ranks = view.odd(GRADIENTS)
    if apart.relative < TINY:
        cause = f"gradients are not bitwise equal, relative distance {apart.relative:.1e} in {name}"
        return _finding(view, "CIUIC-A6", cause, [name], confidence=0.3, severity=Severity.NOTE, evidence=evidence)
    if apart.blocks_share <= SPARSE_SHARE and len(names) <= 2:
        cause = (
            f"a reduction gave rank {listed(map(str, ranks))} another result: {name} differs in "
            f"{apart.blocks_share:.0%} of its "
            f"blocks only, relative distance {apart.relative:.1e}"
        )
        return _finding(
            view,
            "CIUIC-D5",
            cause,
            [name, *(n for n in names if n != name)],
            ranks=ranks,
            confidence=0.8,
            evidence=evidence,
        )
    if apart.after_ratio < SAME_UP_TO_FACTOR and abs(apart.ratio - 1.0) > SAME_UP_TO_FACTOR:
        cause = (
            f"gradients differ between ranks by a factor of {apart.ratio:.4g} in {name}: scaled or clipped on some "
            "ranks only"
        )
        return _finding(view, "CIUIC-A6", cause, names, ranks=ranks, confidence=0.6, evidence=evidence)
    return None

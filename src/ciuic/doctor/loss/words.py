"""The first difference and what was known before, as sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ciuic.doctor.loss.records import (
    GRADIENT,
    INPUT,
    LOSS,
    NAMES_MAX,
    OTHER_WAY,
    PARAMETER_GRADIENT,
    Already,
    First,
    Replayed,
    Verdict,
)


def differs(
    records: Mapping[int, Replayed], first: First, already: Sequence[Already], common: dict[str, Any]
) -> Verdict:
    """The verdict when there is a first difference beyond the tolerance."""
    module = module_of(records, first)
    name = module or name_of(records)
    reason = _reason(already, module, first)
    how = first.how or f"differs by {first.distance:.2g} of its length, more than {first.tolerance:.0e}"
    cause = f"{who(first.ranks)}: {name if how.startswith(OTHER_WAY) else _place(first, name)} {how}"
    if reason is not None:
        cause += f"; before the replay already: {_told(reason)}"
    elif _drew_other_numbers(records, first):
        cause += "; other random numbers were drawn there"
    return Verdict(
        result="differs",
        cause=cause,
        fix=_fix(reason, name, first),
        direction=first.seen.direction,
        module=name,
        what=first.seen.what,
        ranks=first.ranks,
        distance=first.distance,
        tolerance=first.tolerance,
        **common,
    )


def _drew_other_numbers(records: Mapping[int, Replayed], first: First) -> bool:
    usual = {record.random_after for rank, record in records.items() if rank not in first.ranks}
    return any(records[rank].random_after not in usual for rank in first.ranks if rank in records)


def _place(first: First, name: str) -> str:
    seen = first.seen
    if seen.what == LOSS:
        return "all modules agree, the loss"
    if seen.what == PARAMETER_GRADIENT:
        return f"the gradient of {seen.path}"
    if seen.what == GRADIENT:
        return f"what the backward pass of {name} gives, the gradient of the output of {seen.path},"
    if seen.what == INPUT and seen.path:
        return f"what {name} gives to {seen.path}"
    return f"the {seen.what} of {name}"


def module_of(records: Mapping[int, Replayed], first: First) -> str:
    """The path of the module to look at; empty: the model itself."""
    seen = first.seen
    if seen.what == LOSS:
        return LOSS
    if seen.what == INPUT:
        return seen.inside
    if seen.what == PARAMETER_GRADIENT:
        return seen.path.rpartition(".")[0]
    if seen.what == GRADIENT:
        return _consumer(records, first) or seen.inside
    return seen.path


def _consumer(records: Mapping[int, Replayed], first: First) -> str:
    """The outermost module that took the output whose gradient is meant: one inside may be only one of its users."""
    record = next(record for rank, record in sorted(records.items()) if rank not in first.ranks)
    seen = first.seen
    takers = [s.path for s in record.seen if s.source == (seen.path, seen.call, seen.index)]
    return min(takers, key=lambda path: path.count("."), default="")


def _reason(already: Sequence[Already], module: str, first: First) -> Already | None:
    """What of it can be the cause."""
    for each in already:
        if each.what in ("random state", "settings") or not set(first.ranks) & set(each.ranks):
            continue
        if each.what in ("batch", "code"):
            return each
        at = [name for name in each.names if name == module or name.startswith(f"{module}.") or not module]
        if at:
            return msgspec.structs.replace(each, names=tuple(at), count=len(at))
    settings = next((each for each in already if each.what == "settings"), None)
    return settings if settings is not None and set(first.ranks) & set(settings.ranks) else None


def _told(each: Already) -> str:
    shown = ", ".join(each.names[:3])
    more = f" and {each.count - 3} more" if each.count > 3 else ""
    told = {"batch": "the batch", "mode": f"mode of {shown}{more}", "random state": "the random state"}
    told["settings"] = "settings"
    what = told.get(each.what, f"{each.what} {shown}{more}")
    return f"{what} ({each.detail})" if each.detail else what


_FIXES = {
    "parameters": (
        "give all ranks the same parameters: load on every rank, before DDP is built; `ciuic doctor run` says when "
        "they parted"
    ),
    "buffers": "give all ranks the same buffers: broadcast_buffers=True, or load them on every rank",
    "mode": "call model.train() or model.eval() on all ranks alike",
    "code": "start all ranks from the same code",
    "settings": "give all machines the same versions and switches: `ciuic doctor preflight` compares them",
    "batch": "this is expected with different batches: replay one batch on all ranks",
}


def _fix(reason: Already | None, name: str, first: First) -> str:
    if reason is not None and "not" in reason.detail and reason.what == "parameters":
        return "give the model the same type on all ranks (.to(dtype) and autocast alike)"
    if reason is not None and reason.what == "settings" and "autocast" in reason.names:
        return "enter autocast on all ranks alike, with the same type"
    if reason is not None:
        return _FIXES[reason.what]
    where = "the loss function" if name == LOSS else f"{first.seen.direction} of {name}"
    return f"look in {where} for what depends on the rank, the machine, the time, or a random generator of its own"


def shortened(already: Sequence[Already]) -> tuple[Already, ...]:
    """With at most NAMES_MAX names each."""
    return tuple(msgspec.structs.replace(each, names=each.names[:NAMES_MAX]) for each in already)


def name_of(records: Mapping[int, Replayed]) -> str:
    """The model's class."""
    return next(iter(records.values())).model


def who(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:NAMES_MAX]))}"


def verdict_lines(verdict: Verdict) -> list[str]:
    """For a person."""
    lines = [f"{verdict.result}: {verdict.cause}"]
    if verdict.fix:
        lines.append(f"  fix       {verdict.fix}")
    for each in verdict.already:
        usual = " (usual: the replay seeds all alike)" if each.what == "random state" else ""
        lines.append(f"  before    {_told(each)} on {who(each.ranks)}{usual}")
    if verdict.losses:
        lines.append("  loss      " + ", ".join(f"rank {rank} {loss:.9g}" for rank, loss in verdict.losses.items()))
    if verdict.missing and verdict.result != "unknown":
        lines.append(f"  missing   {who(verdict.missing)} did not come")
    lines.extend(f"  could not look: {text}" for text in verdict.could_not_look)
    return lines

"""One batch was replayed on all ranks: which module differs first, by how much, in which direction? Pure."""

import math
import struct
from collections.abc import Mapping
from typing import Any

from ciuic.doctor.case import odd_ones
from ciuic.doctor.loss.before import differed_before
from ciuic.doctor.loss.records import INPUT, OTHER_WAY, TOLERANCES, First, Replayed, Seen, Verdict
from ciuic.doctor.loss.words import differs, module_of, name_of, shortened, who


def judge(records: Mapping[int, Replayed], world: int, tolerances: Mapping[str, float] = TOLERANCES) -> Verdict:
    """What the records of all ranks say together."""
    missing = tuple(rank for rank in range(world) if rank not in records)
    blind = tuple(dict.fromkeys(text for record in records.values() for text in record.unseen))
    already = differed_before(records)
    common: dict[str, Any] = {
        "already": shortened(already),
        "losses": {str(rank): record.loss for rank, record in sorted(records.items()) if record.loss is not None},
        "compared": max((len(record.seen) for record in records.values()), default=0),
        "world": world,
        "missing": missing,
        "could_not_look": blind,
    }
    if len(records) < 2:
        cause = "there is only one rank: nothing to compare with" if world < 2 else f"{who(missing)} did not come"
        return Verdict(result="unknown", cause=cause, fix="call it on every rank, at the same place", **common)
    if len({record.model for record in records.values()}) > 1:
        told = ", ".join(f"rank {rank} {record.model}" for rank, record in sorted(records.items()))
        return Verdict(result="unknown", cause=f"the ranks replayed different models: {told}", **common)
    first, bits = _first(records, tolerances)
    failed = {rank: record.error for rank, record in sorted(records.items()) if record.error}
    if first is None and failed:
        error = next(iter(failed.values()))
        cause = f"the replay ended with an error on {who(tuple(failed))}: {error}"
        return Verdict(result="unknown" if len(failed) == len(records) else "differs", cause=cause, **common)
    if first is not None:
        return differs(records, first, already, common)
    if missing:
        cause = f"{who(missing)} did not come; the others agree"
        return Verdict(result="unknown", cause=cause, fix="look at its log", **common)
    if bits is not None:
        named = module_of(records, bits)
        cause = (
            f"all ranks agree within the tolerance {bits.tolerance:.0e}; the first bits differ in the {bits.seen.what} "
            f"of {named or name_of(records)} on {who(bits.ranks)}, by {bits.distance:.1e}"
        )
        return Verdict(
            result="close",
            cause=cause,
            direction=bits.seen.direction,
            module=named or name_of(records),
            what=bits.seen.what,
            ranks=bits.ranks,
            distance=bits.distance,
            tolerance=bits.tolerance,
            **common,
        )
    return Verdict(
        result="equal", cause=f"all {world} ranks agree bit for bit in {common['compared']} tensors", **common
    )


# ---- the first difference ------------------------------------------------------------------------------------------


def _first(records: Mapping[int, Replayed], tolerances: Mapping[str, float]) -> tuple[First | None, First | None]:
    """(the first beyond the tolerance, the first whose bits differ)."""
    forward = {rank: [s for s in record.seen if s.direction != "backward"] for rank, record in records.items()}
    bits: First | None = None
    tolerance = 0.0
    for at in range(max(len(seen) for seen in forward.values())):
        here = {rank: seen[at] if at < len(seen) else None for rank, seen in sorted(forward.items())}
        elsewhere = odd_ones({rank: None if seen is None else seen.key for rank, seen in here.items()})
        if elsewhere:
            return _other_way(here, elsewhere, records), bits
        found, tolerance = _compare({r: s for r, s in here.items() if s is not None}, tolerance, tolerances)
        if found is not None:
            bits = bits or found
            if found.distance > found.tolerance:
                return found, bits
    backward = {
        rank: {s.key: s for s in record.seen if s.direction == "backward"} for rank, record in sorted(records.items())
    }
    if any(not seen and records[rank].unseen for rank, seen in backward.items()):
        return None, bits
    for key in dict.fromkeys(key for seen in backward.values() for key in seen):
        arrived = {rank: seen.get(key) for rank, seen in backward.items()}
        lacking = odd_ones({rank: seen is None for rank, seen in arrived.items()})
        if lacking:
            return _other_way(arrived, lacking, records), bits
        found, tolerance = _compare({r: s for r, s in arrived.items() if s is not None}, tolerance, tolerances)
        if found is not None:
            bits = bits or found
            if found.distance > found.tolerance:
                return found, bits
    return None, bits


def _compare(here: Mapping[int, Seen], before: float, tolerances: Mapping[str, float]) -> tuple[First | None, float]:
    """The difference in one tensor, if there is any, and the tolerance that holds from now on."""
    tolerance = max([before, *(tolerances.get(seen.dtype, 0.0) for seen in here.values())])
    odd = odd_ones({rank: seen.digest for rank, seen in here.items()})
    if not odd:
        return None, tolerance
    right = here[next(rank for rank in here if rank not in odd)]
    far = {rank: distance(here[rank], right) for rank in odd}
    types = {rank: here[rank].dtype for rank in odd if here[rank].dtype != right.dtype}
    shapes = {rank: here[rank].shape for rank in odd if here[rank].shape != right.shape}
    how = ""
    if types:
        how = f"is {', '.join(sorted(set(types.values())))} there, {right.dtype} on the others"
    elif shapes:
        how = f"has shape {list(next(iter(shapes.values())))} there, {list(right.shape)} on the others"
    worst = math.inf if how else max(far.values())
    beyond = tuple(rank for rank in odd if far[rank] > tolerance) or odd
    return First(seen=right, ranks=beyond if not how else odd, distance=worst, tolerance=tolerance, how=how), tolerance


def distance(one: Seen, other: Seen) -> float:
    """Relative to the other one's length; infinite when they cannot be compared."""
    if one.digest == other.digest:
        return 0.0
    if one.shape != other.shape or not one.sketch or len(one.sketch) != len(other.sketch):
        return math.inf
    count = len(one.sketch) // 8
    pairs = zip(struct.unpack(f"<{count}d", one.sketch), struct.unpack(f"<{count}d", other.sketch), strict=True)
    apart = math.sqrt(sum((a - b) ** 2 for a, b in pairs))
    if not (math.isfinite(apart) and math.isfinite(other.norm)):
        return math.inf
    if other.norm == 0.0:
        return 0.0 if apart == 0.0 else math.inf
    return apart / other.norm


def _other_way(here: Mapping[int, Seen | None], odd: tuple[int, ...], records: Mapping[int, Replayed]) -> First | None:
    """Ranks that called another module there, or none."""
    usual = next(seen for rank, seen in here.items() if rank not in odd)
    unusual = here[odd[0]]
    known = usual or unusual
    if known is None:
        return None
    error = records[odd[0]].error
    if error:
        how = f"ended there with {error}"
    elif known.direction == "backward":
        how = f"has {'no' if unusual is None else 'a'} gradient there, unlike the others"
    else:
        how = f"{OTHER_WAY}: it {_step(unusual)} where it otherwise {_step(usual)}"
    return First(seen=known, ranks=odd, distance=math.inf, tolerance=0.0, how=how)


def _step(seen: Seen | None) -> str:
    if seen is None:
        return "ends"
    return f"calls {seen.path or 'the model'}" if seen.what == INPUT else f"leaves {seen.path or 'the model'}"

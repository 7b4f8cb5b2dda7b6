"""By what the gradients were multiplied between the backward pass and the step, from a few projections of each rank."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ciuic.doctor.case import Round
from ciuic.doctor.facts_training import PROJECTIONS, WITNESS

NOISE = 0.01
"""Of a vector's length: what rounding in low precision may leave when one is a multiple of the other."""
_PACKED = struct.Struct(f"<{PROJECTIONS}f")
Vector = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of one group of ranks."""

    value: float
    """1: the mean over the ranks, as it should be; the number of ranks: a sum."""
    is_managed: bool
    """DDP had averaged before."""
    own: Mapping[int, float]
    """By rank: how its own elements were multiplied beyond what its clipping and unscaling explain."""


def gain_of(round_: Round, ranks: Sequence[int]) -> Gain | None:
    """None: not known, or the ranks' gradients are not synchronised (which is another fault, or local SGD)."""
    facts = list(_facts(round_, ranks).values())
    kind = facts[0][4] if facts else "ledger"
    if kind == "ledger":
        return None
    before = [_unpack(fact[1]) for fact in facts]
    after = [_scaled(_unpack(fact[2]), 1.0 / fact[3]) for fact in facts]
    if kind == "sharded" or len(ranks) == 1:
        return _own_gain(ranks, before, after)
    if not _are_equal(after):
        return None
    is_managed = kind == "ddp" and _are_equal(before)
    base = before[0] if is_managed else _scaled(_sum(before), 1.0 / len(ranks))
    value = multiple(after[0], base)
    return None if value is None else Gain(value=value, is_managed=is_managed, own={})


def own_factors(round_: Round, ranks: Sequence[int]) -> dict[int, float]:
    """By rank, what the gradient was multiplied by in all once it was the same on all ranks (or a shard of one),
    clipping included; only of ranks where it is a plain multiple. Empty when it never was the same."""
    facts = _facts(round_, ranks)
    if not facts:
        return {}
    kind = facts[ranks[0]][4]
    if kind == "sharded" or _are_equal([_unpack(fact[1]) for fact in facts.values()]):
        found = {rank: multiple(_unpack(fact[2]), _unpack(fact[1])) for rank, fact in facts.items()}
        return {rank: value for rank, value in found.items() if value is not None}
    if kind != "ledger" and _are_equal([_scaled(_unpack(fact[2]), 1.0 / fact[3]) for fact in facts.values()]):
        return {rank: fact[3] for rank, fact in facts.items()}  # reduced by hand, then clipped
    return {}


def uncounted(round_: Round, ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks whose own gradient is not in the reduced one: that is one rank's, or the sum of all but one, times a
    number. Empty: none, or not known, as where the ranks' gradients are alike."""
    facts = _facts(round_, ranks)
    if len(ranks) < 2 or not facts or facts[ranks[0]][4] != "plain":
        return ()
    before = {rank: _unpack(fact[1]) for rank, fact in facts.items()}
    after = [_scaled(_unpack(fact[2]), 1.0 / fact[3]) for fact in facts.values()]
    if not _are_equal(after) or multiple(after[0], _sum(list(before.values()))) is not None:
        return ()
    counted = [(rank,) for rank in ranks] + [tuple(r for r in ranks if r != rank) for rank in ranks if len(ranks) > 2]
    fit = [those for those in counted if multiple(after[0], _sum([before[rank] for rank in those])) is not None]
    return tuple(rank for rank in ranks if rank not in fit[0]) if len(fit) == 1 else ()


def clipped_apart(round_: Round, ranks: Sequence[int]) -> dict[int, float]:
    """By rank, what clipping multiplied its own gradient by before a reduction by hand made them one; empty when it did
    not."""
    facts = _facts(round_, ranks)
    if len(ranks) < 2 or not facts or facts[ranks[0]][4] != "plain":
        return {}
    if _are_equal([_unpack(fact[1]) for fact in facts.values()]):
        return {}
    if not _are_equal([_unpack(fact[2]) for fact in facts.values()]):
        return {}
    return {rank: float(fact[3]) for rank, fact in facts.items()}


def multiple(of: Vector, base: Vector) -> float | None:
    """k for which of = k base; None when there is none."""
    length = sum(value * value for value in base)
    size = sum(value * value for value in of)
    if length <= 0 or size <= 0:
        return None
    k = sum(a * b for a, b in zip(of, base, strict=True)) / length
    rest = sum((a - k * b) ** 2 for a, b in zip(of, base, strict=True))
    return k if rest <= NOISE**2 * size else None


def _facts(round_: Round, ranks: Sequence[int]) -> dict[int, list[Any]]:
    """What each rank followed; empty unless all of them followed the same parameter of one kind of model."""
    given = {rank: round_.records[rank].facts.get(WITNESS) for rank in ranks}
    facts = {rank: fact for rank, fact in given.items() if fact is not None}
    is_one = len(facts) == len(ranks) and len({(fact[0], fact[4]) for fact in facts.values()}) == 1
    return facts if is_one else {}


def _own_gain(ranks: Sequence[int], before: Sequence[Vector], after: Sequence[Vector]) -> Gain | None:
    found = {rank: multiple(a, b) for rank, b, a in zip(ranks, before, after, strict=True)}
    values = [value for value in found.values() if value is not None]
    if len(values) != len(ranks) or max(values) - min(values) > NOISE * abs(max(values, key=abs)):
        return None
    own = {rank: value for rank, value in found.items() if value is not None}
    return Gain(value=values[0], is_managed=True, own=own)


def _are_equal(vectors: Sequence[Vector]) -> bool:
    first = vectors[0]
    size = sum(value * value for value in first)
    return all(sum((a - b) ** 2 for a, b in zip(first, other, strict=True)) <= NOISE**2 * size for other in vectors[1:])


def _sum(vectors: Sequence[Vector]) -> Vector:
    return [sum(values) for values in zip(*vectors, strict=True)]


def _scaled(vector: Vector, factor: float) -> Vector:
    return [value * factor for value in vector]


def mean_gain(before: Sequence[bytes], after: Sequence[bytes]) -> float | None:
    """What ranks have after a reduction, in units of the mean of what they had before; None: no multiple of it."""
    finals = [_unpack(packed) for packed in after]
    if not _are_equal(finals):
        return None
    return multiple(finals[0], _scaled(_sum([_unpack(packed) for packed in before]), 1.0 / len(before)))


def _unpack(packed: Any) -> Vector:
    return _PACKED.unpack(packed)

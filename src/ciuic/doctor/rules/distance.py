"""How far apart tensors of two ranks are, from their sketches."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ciuic.doctor.facts_model import BLOCKS, SIGNS

BLOCK_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Between the tensors of one name on two ranks."""

    relative: float
    """Length of the difference / length of the longer one, estimated; 0 for two zeros."""
    ratio: float
    """By what one must be multiplied to come closest to the other."""
    after_ratio: float
    """Relative distance that is left then."""
    blocks_share: float
    """Share of the tensor's blocks that differ."""


def distance(one: Any, other: Any) -> Distance | None:
    """Of two answers to SKETCH; None when they cannot be compared."""
    try:
        length_a, size_a, raw_a, blocks_a = one
        length_b, size_b, raw_b, blocks_b = other
        a, b = struct.unpack(f"<{SIGNS}f", raw_a), struct.unpack(f"<{SIGNS}f", raw_b)
        differing = sum(_block(blocks_a, at) != _block(blocks_b, at) for at in range(BLOCKS))
    except (TypeError, ValueError, struct.error):
        return None
    longer = max(length_a, length_b)
    if size_a != size_b or not math.isfinite(longer):
        return None
    if longer == 0:
        return Distance(relative=0.0, ratio=1.0, after_ratio=0.0, blocks_share=0.0)
    dot, square = sum(x * y for x, y in zip(a, b, strict=True)), sum(y * y for y in b)
    ratio = dot / square if square else 0.0
    used = max(1, min(BLOCKS, size_a))
    return Distance(
        relative=_length(x - y for x, y in zip(a, b, strict=True)) / longer,
        ratio=ratio,
        after_ratio=_length(x - ratio * y for x, y in zip(a, b, strict=True)) / longer,
        blocks_share=min(1.0, differing / used),
    )


def farthest(answers: Mapping[int, Mapping[str, Any]], names: list[str]) -> tuple[str, Distance] | None:
    """The name with the greatest relative distance between the first rank and any other."""
    ranks = sorted(answers)
    best: tuple[str, Distance] | None = None
    for name in names:
        for rank in ranks[1:]:
            found = distance(answers[ranks[0]].get(name), answers[rank].get(name))
            if found is not None and (best is None or found.relative > best[1].relative):
                best = name, found
    return best


def _length(values: Any) -> float:
    return math.sqrt(sum(value * value for value in values))


def _block(blocks: bytes, at: int) -> bytes:
    return bytes(blocks)[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]

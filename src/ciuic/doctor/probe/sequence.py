"""The order of the calls of one group on this rank: a rolling digest, and the last calls themselves."""

from collections import deque
from dataclasses import dataclass, field

import xxhash
from torch import Tensor

from ciuic.doctor.probe.part import Call

CALLS_HELD = 512
"""Of each group."""
POWERS = 20
SAME_SHAPE = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce_coalesced"}
)
"""Collectives whose tensors must have the same shapes and types on all ranks."""
POINT_TO_POINT = frozenset({"send", "recv"})
SHAPES_MAX = 8


@dataclass(eq=False, kw_only=True)
class Made:
    """One call, without its tensors."""

    group: str
    number: int
    name: str
    detail: str
    site: str
    step: int
    ranks: tuple[int, ...]


def detail_of(call: Call) -> str:
    """Shapes, types and operation, where all ranks must agree on them; else empty."""
    if call.name == "all_gather" and call.backend == "gloo" and call.tensors:
        return shape_of(call.tensors[-1])  # what it gives; NCCL lets ranks give different sizes
    if call.name not in SAME_SHAPE:
        return ""
    shapes = [shape_of(tensor) for tensor in call.tensors[:SHAPES_MAX]]
    if len(call.tensors) > SHAPES_MAX:
        shapes.append(f"and {len(call.tensors) - SHAPES_MAX} more")
    return " ".join([*shapes, call.operation]).strip()


def shape_of(tensor: Tensor) -> str:
    """float32[4,8]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


@dataclass(eq=False, kw_only=True)
class Sequence:
    """The calls of one group. Read from another thread while it grows: each entry is written whole."""

    ranks: tuple[int, ...]
    number: int = 0
    digest: bytes = b"\0" * 8
    last: deque[Made] = field(default_factory=lambda: deque(maxlen=CALLS_HELD))
    _marks: list[tuple[int, bytes]] = field(default_factory=lambda: [(0, b"")] * POWERS)

    def add(self, made: Made) -> None:
        """The next call; its number is set here."""
        self.number += 1
        made.number = self.number
        self.digest = xxhash.xxh3_64_digest(self.digest + f"{made.name} {made.detail}".encode())
        self.last.append(made)
        power = (self.number & -self.number).bit_length() - 1
        mark = self.number, self.digest
        for at in range(min(power + 1, POWERS)):
            self._marks[at] = mark

    def marks(self) -> list[list[int | bytes]]:
        """[number, digest] at the newest multiple of each power of two, without repetitions."""
        return [list(mark) for mark in sorted(set(self._marks)) if mark[0]]

"""Which rank owns which part of each parameter, and what travels for one bucket.

Ownership follows the parameter, not the bucket: DDP builds its buckets anew after the first step, and what an owner
keeps for later must survive that. A part is a run of whole units of at most 4096 elements that never cross a row of
an embedding or of an expert matrix, so every scale block lies in one part. Padding does not exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ciuic.codec import FragmentShape

UNIT_ELEMENTS = 4096
"""A multiple of the block of every codec."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One trainable parameter, in the model's order."""

    name: str
    element_count: int
    row_length: int
    """Scale blocks do not cross rows of this length; `element_count` when they may."""
    is_coded: bool
    """False: travels in bfloat16 (1-D, routers, fewer than 4096 elements)."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a parameter inside a bucket."""

    parameter: int
    start: int
    stop: int
    at: int
    """Where `start` lies in the bucket's buffer."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one message holds: coded spans, then small ones."""

    spans: tuple[Span, ...]
    shape: FragmentShape

    @property
    def element_count(self) -> int:
        return self.shape.element_count


def cut(parameters: Sequence[Parameter], owners: int) -> list[list[tuple[int, int]]]:
    """[parameter][owner] -> (start, stop): nearly equal runs of units; the odd ones go to each owner in turn."""
    parts: list[list[tuple[int, int]]] = []
    turns = {True: 0, False: 0}
    for parameter in parameters:
        units = _unit_count(parameter)
        share, odd = divmod(units, owners)
        turn = turns[parameter.is_coded]
        turns[parameter.is_coded] = (turn + odd) % owners
        ranges, unit = [], 0
        for owner in range(owners):
            end = unit + share + ((owner - turn) % owners < odd)
            ranges.append((_unit_start(parameter, unit), _unit_start(parameter, end)))
            unit = end
        parts.append(ranges)
    return parts


def chunk_of(
    bucket: Sequence[int], parameters: Sequence[Parameter], ranges: Sequence[tuple[int, int]] | None = None
) -> Chunk:
    """The chunk of a bucket (parameter numbers in the order of its buffer) that covers `ranges`[parameter], or all."""
    coded: list[Span] = []
    small: list[Span] = []
    rows: list[tuple[int, int]] = []
    offset = 0
    for number in bucket:
        parameter = parameters[number]
        start, stop = (0, parameter.element_count) if ranges is None else ranges[number]
        if start < stop:
            span = Span(parameter=number, start=start, stop=stop, at=offset + start)
            (coded if parameter.is_coded else small).append(span)
            if parameter.is_coded:
                rows += rows_between(start, stop, parameter.row_length)
        offset += parameter.element_count
    small_count = sum(span.stop - span.start for span in small)
    shape = FragmentShape(rows=tuple(rows), small_count=small_count, buffer_count=0)
    return Chunk(spans=(*coded, *small), shape=shape)


def rows_between(start: int, stop: int, row_length: int) -> list[tuple[int, int]]:
    """Elements start..stop of a tensor of rows, as (row count, row length): rest of a row, whole rows, begin of one."""
    rows = []
    head = min(-start % row_length, stop - start)
    if head:
        rows.append((1, head))
    whole, tail = divmod(stop - start - head, row_length)
    if whole:
        rows.append((whole, row_length))
    if tail:
        rows.append((1, tail))
    return rows


def _unit_count(parameter: Parameter) -> int:
    return parameter.element_count // parameter.row_length * _units_per_row(parameter)


def _units_per_row(parameter: Parameter) -> int:
    return -(-parameter.row_length // UNIT_ELEMENTS)


def _unit_start(parameter: Parameter, unit: int) -> int:
    row, place = divmod(unit, _units_per_row(parameter))
    return row * parameter.row_length + place * UNIT_ELEMENTS

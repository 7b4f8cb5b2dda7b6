"""Scale blocks: which elements share one scale.

A block never crosses a row of a row-aligned tensor (embeddings, expert matrices), so a row nobody touched has scale 0
and decodes to exact zeros. Other tensors are cut into blocks of the codec's size. Blocks never cross a tensor.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_ELEMENTS = 4096
"""No block is larger."""
KEPT_OF = 64
"""Top-k keeps one of so many elements of a block, rounded up."""


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """The blocks of one coded section, or of a run of its blocks, in storage order."""

    lengths: NDArray[np.int64]
    """[blocks] elements in each block, all > 0."""
    starts: NDArray[np.int64]
    """[blocks] first element of each block."""
    element_count: int

    @property
    def block_count(self) -> int:
        return len(self.lengths)

    @cached_property
    def kept(self) -> NDArray[np.int64]:
        """[blocks] elements of each block that top-k keeps."""
        return (self.lengths + (KEPT_OF - 1)) // KEPT_OF

    @cached_property
    def uniform_length(self) -> int:
        """The length of all blocks when it is the same, else 0."""
        same = self.block_count > 0 and bool((self.lengths == self.lengths[0]).all())
        return int(self.lengths[0]) if same else 0

    def reduce(self, ufunc: np.ufunc, values: NDArray[Any], dtype: Any = None) -> NDArray[Any]:
        """[n] values reduced over each block, [blocks]."""
        if not self.block_count:
            return np.zeros(0, dtype or values.dtype)
        if self.uniform_length:
            return ufunc.reduce(values.reshape(-1, self.uniform_length), axis=1, dtype=dtype)
        return ufunc.reduceat(values, self.starts, dtype=dtype)

    def apply(self, ufunc: np.ufunc, values: NDArray[Any], per_block: NDArray[Any]) -> None:
        """values = ufunc(values, the number of their block), in place, [n]."""
        if self.uniform_length:
            rows = values.reshape(-1, self.uniform_length)
            ufunc(rows, per_block[:, None], out=rows)
        else:
            ufunc(values, np.repeat(per_block, self.lengths), out=values)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A run of whole blocks whose packed bits begin on a whole byte: codecs may work on it alone."""

    first_block: int
    start: int
    """First element."""
    kept_start: int
    """First kept element (top-k)."""
    blocks: BlockTable

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.blocks.element_count


def build_blocks(rows: tuple[tuple[int, int], ...], max_block: int) -> BlockTable:
    """Cut tensors, given as (row count, row length), into blocks of at most `max_block` elements within each row."""
    parts: list[NDArray[np.int64]] = []
    for row_count, row_length in rows:
        whole, rest = divmod(row_length, max_block)
        row = np.full(whole + (rest > 0), max_block, np.int64)
        if rest:
            row[-1] = rest
        parts.append(np.tile(row, row_count))
    lengths = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    ends = np.cumsum(lengths)
    return BlockTable(lengths=lengths, starts=ends - lengths, element_count=int(ends[-1]) if len(ends) else 0)


def span_bounds(table: BlockTable, target_elements: int) -> NDArray[np.int64]:
    """[spans + 1] first block of each span of at least `target_elements` (the last may be shorter); last: all blocks.

    A span begins where a multiple of 8 elements and of 4 kept elements lie before it. Rows of odd length make longer
    spans.
    """
    if not table.block_count:
        return np.zeros(1, np.int64)
    kept_before = np.cumsum(table.kept) - table.kept
    possible = np.flatnonzero((table.starts % 8 == 0) & (kept_before % 4 == 0))
    begins = table.starts[possible]
    bounds = [0]
    while True:
        place = int(np.searchsorted(begins, table.starts[bounds[-1]] + target_elements))
        if place >= len(possible):
            return np.array([*bounds, table.block_count], np.int64)
        bounds.append(int(possible[place]))


def cut_spans(table: BlockTable, target_elements: int) -> list[Span]:
    """The spans of a table (see `span_bounds`), with tables of their own."""
    bounds = span_bounds(table, target_elements)
    kept_before = np.cumsum(table.kept) - table.kept
    spans = []
    for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        start, lengths = int(table.starts[first]), table.lengths[first:stop]
        own = BlockTable(lengths=lengths, starts=table.starts[first:stop] - start, element_count=int(lengths.sum()))
        kept = int(kept_before[first])
        spans.append(Span(first_block=first, start=start, kept_start=kept, blocks=own))
    return spans

"""Scale blocks: which elements share one scale.

A block never crosses a row of a row-aligned tensor (embeddings, expert matrices), so a row nobody touched has scale 0
and decodes to exact zeros. Other tensors are cut into blocks of the codec's size. Blocks never cross a tensor.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """The blocks of one coded section, in storage order."""

    lengths: NDArray[np.int64]
    """[blocks] elements in each block, all > 0."""
    starts: NDArray[np.int64]
    """[blocks] first element of each block."""
    element_count: int

    @property
    def block_count(self) -> int:
        return len(self.lengths)


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

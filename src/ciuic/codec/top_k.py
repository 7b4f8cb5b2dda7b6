"""The largest 64 of 4096: where they are (12 bits) and roughly how large (2 bits); the residual keeps all others.

    kept   ceil(n / 64) of a block of n: the largest magnitudes, of equal ones those with the lower indices
    index  12 bits inside the block, ascending
    code   bit 0: x >= 0;  bit 1: |x| is over the mean of the kept magnitudes
    scales two bfloat16 per block: the mean of the kept magnitudes up to that mean, and of those over it
    value  +-(the scale of its group), else 0

Which elements are kept is defined exactly, so how a back end finds them (the native one guesses a threshold from a
sample) does not change a byte. An index that does not ascend or lies outside its block, which only a damaged payload
has, is dropped.
"""

import numpy as np
from numpy.typing import NDArray

from ciuic.codec.bf16 import BF16_MAX, bf16_decode, bf16_encode
from ciuic.codec.blocks import BLOCK_ELEMENTS, BlockTable
from ciuic.codec.scalar import Bytes, Float, Streams, as_uint16

INDEX_BITS = 12


class TopKCodec:
    """See the module."""

    max_block = BLOCK_ELEMENTS
    small_bytes = 2
    dithers = False
    nearly_exact = False

    def sizes(self, elements: int, blocks: int, kept: int) -> tuple[int, ...]:
        """Indices, codes, scales."""
        return (INDEX_BITS * kept + 7) // 8, (2 * kept + 7) // 8, 4 * blocks

    def encode(self, values: Float, blocks: BlockTable, streams: Streams, noise: Float | None = None) -> None:
        if not blocks.block_count:
            return
        rows, places = largest_of_each(values, blocks)
        chosen = values[blocks.starts[rows] + places]
        exact = np.abs(chosen).astype(np.float64)
        begins = np.cumsum(blocks.kept) - blocks.kept
        high = exact * blocks.kept[rows] > np.add.reduceat(exact, begins)[rows]
        scales = np.zeros((blocks.block_count, 2), np.float64)
        for group, members in enumerate((~high, high)):
            count = np.add.reduceat(members, begins, dtype=np.int64)
            scales[:, group] = np.add.reduceat(np.where(members, exact, 0), begins) / np.maximum(count, 1)
        streams[2][:] = bf16_encode(np.minimum(scales, BF16_MAX).astype(np.float32).reshape(-1)).view(np.uint8)
        streams[0][:] = pack_indices(places)
        codes = np.zeros(4 * len(streams[1]), np.uint8)
        codes[: len(chosen)] = (chosen >= 0).view(np.uint8) | high.view(np.uint8) << np.uint8(1)
        streams[1][:] = (
            codes[0::4] | codes[1::4] << np.uint8(2) | codes[2::4] << np.uint8(4) | codes[3::4] << np.uint8(6)
        )

    def decode(self, streams: Streams, blocks: BlockTable, out: Float) -> None:
        out[:] = 0
        kept = blocks.kept
        rows = np.repeat(np.arange(blocks.block_count), kept)
        places = unpack_indices(streams[0], len(rows))
        order = rows << 13 | places
        before = np.concatenate([np.full(1, -1, np.int64), np.maximum.accumulate(order)[:-1]])[: len(order)]
        sound = (order > before) & (places < blocks.lengths[rows])
        codes = np.empty((len(streams[1]), 4), np.uint8)
        for place in range(4):
            np.right_shift(streams[1], np.uint8(2 * place), out=codes[:, place])
        codes = codes.reshape(-1)[: len(rows)]
        levels = bf16_decode(as_uint16(streams[2]))[2 * rows + (codes >> np.uint8(1) & np.uint8(1))]
        values = np.where(codes & np.uint8(1), levels, -levels)
        out[(blocks.starts[rows] + places)[sound]] = values[sound]


def largest_of_each(values: Float, blocks: BlockTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Block and index inside the block of what is kept of [n] values, in storage order."""
    length = int(blocks.lengths.max())
    sizes = np.abs(values).view(np.uint32).astype(np.int64) << INDEX_BITS
    if blocks.uniform_length:
        keys = sizes.reshape(-1, length)
    else:
        keys = np.full((blocks.block_count, length), -BLOCK_ELEMENTS, np.int64)
        keys[np.arange(length) < blocks.lengths[:, None]] = sizes
    keys += np.arange(BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS - 1 - length, -1)  # all keys of a block differ
    most = int(blocks.kept.max())
    top = np.sort(np.partition(keys, length - most, axis=1)[:, length - most :], axis=1)
    least = top[np.arange(blocks.block_count), most - blocks.kept]
    rows, places = np.nonzero(keys >= least[:, None])
    return rows, places


def pack_indices(places: NDArray[np.int64]) -> Bytes:
    """[k] numbers of 12 bits as bytes [(12 k + 7) // 8], the first in the lowest bits."""
    pairs = np.zeros((len(places) + 1) // 2 * 2, np.uint32)
    pairs[: len(places)] = places
    words = pairs[0::2] | pairs[1::2] << np.uint32(INDEX_BITS)
    packed = words.view(np.uint8).reshape(-1, 4)[:, :3]
    return packed.reshape(-1)[: (INDEX_BITS * len(places) + 7) // 8]


def unpack_indices(packed: Bytes, count: int) -> NDArray[np.int64]:
    """The reverse."""
    padded = np.zeros((count + 1) // 2 * 3, np.uint8)
    padded[: len(packed)] = packed
    words = np.zeros(((count + 1) // 2, 4), np.uint8)
    words[:, :3] = padded.reshape(-1, 3)
    pairs = words.reshape(-1).view("<u4")
    places = np.empty((len(pairs), 2), np.int64)
    places[:, 0] = pairs & np.uint32(0xFFF)
    places[:, 1] = pairs >> np.uint32(INDEX_BITS)
    return places.reshape(-1)[:count]

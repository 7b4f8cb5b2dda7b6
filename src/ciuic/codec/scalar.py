"""The codecs of one section: none, bf16, int8, int4, 2-bit, 1-bit and top-k. docs/reference/codecs.md has every bit.

Decoding is exact in fp32 (an integer of at most 8 bits times a bfloat16, or a bfloat16 itself), so every back end gets
the same bits. Here is the numpy back end, which is also the description that the others must agree with.
Inputs must be finite: the caller checks before a residual is touched.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ciuic.codec.bf16 import BF16_MAX, bf16_decode, bf16_encode, bf16_encode_up
from ciuic.codec.blocks import BLOCK_ELEMENTS, BlockTable
from ciuic.codec.finite import LARGEST

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Streams = tuple[Bytes, ...]
"""The parts of an encoded section, in the order in which they are sent."""


class ScalarCodec(Protocol):
    """Encodes [n] fp32 values of one block table, or of a span of it."""

    max_block: int
    small_bytes: int
    """Bytes per element of the full-precision section that travels with this codec (2: bf16, 4: fp32)."""
    dithers: bool
    """Whether it can round stochastically. Where neither this nor `nearly_exact` holds, asking for it is an error."""
    nearly_exact: bool
    """Full precision or bfloat16: stochastic rounding would change nothing that matters and is left out."""

    def sizes(self, elements: int, blocks: int, kept: int) -> tuple[int, ...]:
        """Bytes of each stream of so many elements, blocks and (top-k) kept elements."""
        ...

    def encode(self, values: Float, blocks: BlockTable, streams: Streams, noise: Float | None = None) -> None:
        """Fill the streams. `noise`: [n] in (0, 1), for stochastic rounding. Does not change its input."""
        ...

    def decode(self, streams: Streams, blocks: BlockTable, out: Float) -> None:
        """Write the decoded values into `out` [n]."""
        ...


class NoneCodec:
    """fp32 as it is."""

    max_block = BLOCK_ELEMENTS
    small_bytes = 4
    dithers = False
    nearly_exact = True

    def sizes(self, elements: int, blocks: int, kept: int) -> tuple[int, ...]:
        return (4 * elements,)

    def encode(self, values: Float, blocks: BlockTable, streams: Streams, noise: Float | None = None) -> None:
        streams[0][:] = np.ascontiguousarray(values).view(np.uint8)

    def decode(self, streams: Streams, blocks: BlockTable, out: Float) -> None:
        out.view(np.uint8)[:] = streams[0]


class Bf16Codec:
    """The upper half of each fp32, rounded to nearest even."""

    max_block = BLOCK_ELEMENTS
    small_bytes = 2
    dithers = False
    nearly_exact = True

    def sizes(self, elements: int, blocks: int, kept: int) -> tuple[int, ...]:
        return (2 * elements,)

    def encode(self, values: Float, blocks: BlockTable, streams: Streams, noise: Float | None = None) -> None:
        streams[0][:] = bf16_encode(values).view(np.uint8)

    def decode(self, streams: Streams, blocks: BlockTable, out: Float) -> None:
        out[:] = bf16_decode(as_uint16(streams[0]))


class OneBitCodec:
    """One bit per element, x >= 0, and the block's mean magnitude (an L2 norm is no contraction on heavy tails)."""

    max_block = 4096
    small_bytes = 2
    dithers = False
    nearly_exact = False

    def sizes(self, elements: int, blocks: int, kept: int) -> tuple[int, ...]:
        return (elements + 7) // 8, 2 * blocks

    def encode(self, values: Float, blocks: BlockTable, streams: Streams, noise: Float | None = None) -> None:
        streams[0][:] = np.packbits(values >= 0, bitorder="little")
        streams[1][:] = bf16_encode(block_means(np.abs(values), blocks)).view(np.uint8)

    def decode(self, streams: Streams, blocks: BlockTable, out: Float) -> None:
        negative = np.unpackbits(~streams[0], count=blocks.element_count, bitorder="little")
        bits = out.view(np.uint32)
        np.left_shift(negative, np.uint32(31), out=bits, dtype=np.uint32)
        blocks.apply(np.bitwise_xor, bits, bf16_decode(as_uint16(streams[1])).view(np.uint32))

    def residual(self, x: Float, blocks: BlockTable, streams: Streams, out: Float) -> bool:
        """Encode x [n] and write x - decoded into `out`: with its own sign, |x| - scale. Uses x as its scratch.

        Returns False, with x as it was, when a value may not be finite.
        """
        np.abs(x, out=out)
        means = block_means(out, blocks)
        if not means.max(initial=0) < LARGEST / self.max_block:
            return False
        x += np.float32(0)  # so that -0 has the sign of the bit that is sent for it
        streams[0][:] = np.packbits(x >= 0, bitorder="little")
        scale_bits = bf16_encode(means)
        streams[1][:] = scale_bits.view(np.uint8)
        blocks.apply(np.subtract, out, bf16_decode(scale_bits))
        signs, bits = x.view(np.uint32), out.view(np.uint32)
        signs &= np.uint32(0x80000000)
        bits ^= signs
        return True


class IntegerCodec:
    """Symmetric integers with the block's largest magnitude as the outermost level.

    q = round(x / scale), ties to even, or floor(x / scale + noise) with the scale rounded up; int4 is stored as q + 8.
    """

    small_bytes = 2
    dithers = True
    nearly_exact = False

    def __init__(self, *, levels: int, bits: int, max_block: int) -> None:
        self.levels = levels
        self.bits = bits
        self.max_block = max_block

    def sizes(self, elements: int, blocks: int, kept: int) -> tuple[int, ...]:
        return (elements * self.bits + 7) // 8, 2 * blocks

    def encode(self, values: Float, blocks: BlockTable, streams: Streams, noise: Float | None = None) -> None:
        quotient = np.abs(values)
        largest = blocks.reduce(np.maximum, quotient)
        wanted = np.minimum(largest / np.float32(self.levels), self.scale_limit())
        scale_bits = bf16_encode(wanted) if noise is None else bf16_encode_up(wanted)
        streams[1][:] = scale_bits.view(np.uint8)
        scales = bf16_decode(scale_bits)
        quotient[:] = values
        blocks.apply(np.divide, quotient, np.where(scales > 0, scales, np.float32(1)))
        if noise is None:
            np.rint(quotient, out=quotient)
        else:
            quotient += noise
            np.floor(quotient, out=quotient)
        np.clip(quotient, -self.levels, self.levels, out=quotient)
        streams[0][:] = self._pack(quotient.astype(np.int8))

    def decode(self, streams: Streams, blocks: BlockTable, out: Float) -> None:
        out[:] = self._unpack(streams[0], blocks.element_count)
        with np.errstate(over="ignore", invalid="ignore"):  # damaged scales; the caller looks for non-finite values
            blocks.apply(np.multiply, out, bf16_decode(as_uint16(streams[1])))

    def scale_limit(self) -> np.float32:
        """Scales stay below this, so that levels x scale is finite even after rounding the scale up to bfloat16."""
        return np.float32(BF16_MAX / self.levels * (1 - 2.0**-8))

    def _pack(self, codes: NDArray[np.int8]) -> Bytes:
        if self.bits == 8:
            return codes.view(np.uint8)
        shifted = (codes + np.int8(8)).view(np.uint8)
        if len(shifted) % 2:
            shifted = np.append(shifted, np.uint8(8))
        return shifted[0::2] | (shifted[1::2] << np.uint8(4))

    def _unpack(self, packed: Bytes, count: int) -> NDArray[np.int8]:
        if self.bits == 8:
            return packed.view(np.int8)
        halves = np.empty((len(packed), 2), np.uint8)
        np.bitwise_and(packed, np.uint8(15), out=halves[:, 0])
        np.right_shift(packed, np.uint8(4), out=halves[:, 1])
        return halves.reshape(-1)[:count].view(np.int8) - np.int8(8)


_SAFE_SUM = 1e30


def block_means(sizes: Float, blocks: BlockTable) -> Float:
    """Means of magnitudes [n] over each block, fp32 [blocks], at most the largest bfloat16.

    Sums are fp32 (in several lanes) where blocks are equally long and the sums far from the largest number, else fp64.
    """
    if blocks.uniform_length:
        with np.errstate(over="ignore"):
            sums = np.einsum("ij->i", sizes.reshape(-1, blocks.uniform_length))
        if sums.max() < _SAFE_SUM:
            return sums / np.float32(blocks.uniform_length)
    exact = blocks.reduce(np.add, sizes, np.float64)
    return np.minimum(exact / blocks.lengths, BF16_MAX).astype(np.float32)


def as_uint16(payload: Bytes) -> NDArray[np.uint16]:
    """Little-endian pairs of bytes, whatever the alignment of the buffer."""
    return np.frombuffer(payload.tobytes(), "<u2")

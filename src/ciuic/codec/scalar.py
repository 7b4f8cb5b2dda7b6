"""The codecs of one coded section: none, bf16, int8, int4 and 1-bit.

Bits on the wire of a block codec: packed values, then one bfloat16 scale per block.
  1-bit  bit = (x >= 0), scale = mean |x| of the block, decoded +-scale (the L2 norm is no contraction on heavy tails).
  int8   q = round(x / scale) in -127..127, scale = max |x| / 127.
  int4   q in -7..7 stored as q + 8 in half a byte, scale = max |x| / 7.
Decoding is exact in fp32 (an integer of at most 7 bits times a bfloat16), so every back end gets the same bits.
Inputs must be finite: the caller checks before a residual is touched.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ciuic.codec.bf16 import BF16_MAX, bf16_decode, bf16_encode
from ciuic.codec.blocks import BlockTable
from ciuic.errors import CodecUnavailableError

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class ScalarCodec(Protocol):
    """Encodes [n] fp32 values of one block table."""

    max_block: int
    small_bytes: int
    """Bytes per element of the full-precision section that travels with this codec (2: bf16, 4: fp32)."""

    def payload_bytes(self, blocks: BlockTable) -> int:
        """Exact size of an encoded section."""
        ...

    def encode(self, values: Float, blocks: BlockTable, out: Bytes) -> None:
        """Write the encoded section into `out` [payload_bytes]."""
        ...

    def decode(self, payload: Bytes, blocks: BlockTable, out: Float) -> None:
        """Write the decoded values into `out` [n]."""
        ...


class NoneCodec:
    """fp32 as it is."""

    max_block = 1 << 20
    small_bytes = 4

    def payload_bytes(self, blocks: BlockTable) -> int:
        return 4 * blocks.element_count

    def encode(self, values: Float, blocks: BlockTable, out: Bytes) -> None:
        out.view(np.float32)[:] = values

    def decode(self, payload: Bytes, blocks: BlockTable, out: Float) -> None:
        out.view(np.uint8)[:] = payload


class Bf16Codec:
    """The upper half of each fp32, rounded to nearest even."""

    max_block = 1 << 20
    small_bytes = 2

    def payload_bytes(self, blocks: BlockTable) -> int:
        return 2 * blocks.element_count

    def encode(self, values: Float, blocks: BlockTable, out: Bytes) -> None:
        out.view(np.uint16)[:] = bf16_encode(values)

    def decode(self, payload: Bytes, blocks: BlockTable, out: Float) -> None:
        out[:] = bf16_decode(as_uint16(payload))


class OneBitCodec:
    """One bit per element and the block's mean magnitude."""

    max_block = 4096
    small_bytes = 2

    def payload_bytes(self, blocks: BlockTable) -> int:
        return (blocks.element_count + 7) // 8 + 2 * blocks.block_count

    def encode(self, values: Float, blocks: BlockTable, out: Bytes) -> None:
        packed_bytes = (blocks.element_count + 7) // 8
        out[:packed_bytes] = np.packbits(values >= 0, bitorder="little")
        if blocks.block_count:
            sums = np.add.reduceat(np.abs(values), blocks.starts, dtype=np.float64)
            means = np.minimum(sums / blocks.lengths, BF16_MAX).astype(np.float32)
            out[packed_bytes:] = bf16_encode(means).view(np.uint8)

    def decode(self, payload: Bytes, blocks: BlockTable, out: Float) -> None:
        packed_bytes = (blocks.element_count + 7) // 8
        out[:] = np.repeat(bf16_decode(as_uint16(payload[packed_bytes:])), blocks.lengths)
        negative = np.unpackbits(~payload[:packed_bytes], count=blocks.element_count, bitorder="little")
        out.view(np.uint32)[:] ^= negative.astype(np.uint32) << np.uint32(31)


class IntegerCodec:
    """Symmetric integers with the block's largest magnitude as the outermost level."""

    small_bytes = 2

    def __init__(self, *, levels: int, bits: int, max_block: int) -> None:
        self.levels = levels
        self.bits = bits
        self.max_block = max_block

    def payload_bytes(self, blocks: BlockTable) -> int:
        return (blocks.element_count * self.bits + 7) // 8 + 2 * blocks.block_count

    def encode(self, values: Float, blocks: BlockTable, out: Bytes) -> None:
        packed_bytes = (blocks.element_count * self.bits + 7) // 8
        if not blocks.block_count:
            return
        largest = np.maximum.reduceat(np.abs(values), blocks.starts)
        scale_bits = bf16_encode(np.minimum(largest / np.float32(self.levels), self.scale_limit()))
        out[packed_bytes:] = scale_bits.view(np.uint8)
        scales = bf16_decode(scale_bits)
        divisor = np.repeat(np.where(scales > 0, scales, np.float32(1)), blocks.lengths)
        quotient = np.divide(values, divisor, out=divisor)
        np.rint(quotient, out=quotient)
        np.clip(quotient, -self.levels, self.levels, out=quotient)
        out[:packed_bytes] = self._pack(quotient.astype(np.int8))

    def decode(self, payload: Bytes, blocks: BlockTable, out: Float) -> None:
        packed_bytes = (blocks.element_count * self.bits + 7) // 8
        out[:] = np.repeat(bf16_decode(as_uint16(payload[packed_bytes:])), blocks.lengths)
        with np.errstate(over="ignore", invalid="ignore"):  # damaged scales; the caller looks for non-finite values
            out *= self._unpack(payload[:packed_bytes], blocks.element_count)

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


def as_uint16(payload: Bytes) -> NDArray[np.uint16]:
    """Little-endian pairs of bytes, whatever the alignment of the buffer."""
    return np.frombuffer(payload.tobytes(), "<u2")


_CODECS: dict[str, ScalarCodec] = {
    "none": NoneCodec(),
    "bf16": Bf16Codec(),
    "int8": IntegerCodec(levels=127, bits=8, max_block=256),
    "int4": IntegerCodec(levels=7, bits=4, max_block=256),
    "1-bit": OneBitCodec(),
}
CODEC_NAMES = tuple(_CODECS)


def scalar_codec(name: str) -> ScalarCodec:
    """The codec of that name. Raises CodecUnavailableError: full precision is never used silently instead."""
    try:
        return _CODECS[name]
    except KeyError:
        raise CodecUnavailableError(
            f"there is no codec {name!r}", cause=f"known codecs: {', '.join(CODEC_NAMES)}", next="choose one of them"
        ) from None

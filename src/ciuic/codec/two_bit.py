"""Two bits per element: the four levels that are best for a normal distribution (Lloyd 1957, Max 1960).

    scale  one bfloat16 per block
    code   bit 0: x >= 0;  bit 1: |x| > 251/256 bfloat16(rms)
    value  +-(58/128) scale or +-(193/128) scale

The levels 0.4528 and 1.5104 and the border 0.9816 of the normal distribution are taken to the nearest fractions whose
products with a bfloat16 are exact in fp32. The scale is then fitted to the codes by least squares,
sum |x| level / sum level^2: for normal numbers that is the rms, and on any other block the error is smaller than the
block, which error feedback needs (with the rms itself it is not, for one spike among zeros).
"""

import numpy as np

from ciuic.codec.bf16 import BF16_MAX, bf16_decode, bf16_encode
from ciuic.codec.blocks import BlockTable
from ciuic.codec.scalar import Float, Streams, as_uint16

INNER, OUTER, MIDDLE = 58 / 128, 193 / 128, 251 / 256
SCALE_LIMIT = np.float32(BF16_MAX / OUTER * (1 - 2.0**-8))
"""Keeps the outer level finite."""


class TwoBitCodec:
    """See the module; all sums are fp64, so that back ends agree."""

    max_block = 256
    small_bytes = 2
    dithers = False
    nearly_exact = False

    def sizes(self, elements: int, blocks: int, kept: int) -> tuple[int, ...]:
        return (elements + 3) // 4, 2 * blocks

    def encode(self, values: Float, blocks: BlockTable, streams: Streams, noise: Float | None = None) -> None:
        sizes = np.abs(values)
        exact = sizes.astype(np.float64)
        mean_square = blocks.reduce(np.add, exact * exact) / blocks.lengths
        rms = bf16_decode(bf16_encode(np.minimum(np.sqrt(mean_square), BF16_MAX).astype(np.float32)))
        border = np.repeat(np.float32(MIDDLE) * rms, blocks.lengths)
        outside = sizes > border
        sum_outside = blocks.reduce(np.add, np.where(outside, exact, 0))
        sum_inside = blocks.reduce(np.add, np.where(outside, 0, exact))
        count = blocks.reduce(np.add, outside, np.int64)
        over = INNER * sum_inside + OUTER * sum_outside
        under = INNER * INNER * (blocks.lengths - count) + OUTER * OUTER * count
        scale = np.minimum(over / under, float(SCALE_LIMIT)).astype(np.float32)
        streams[1][:] = bf16_encode(scale).view(np.uint8)
        codes = np.zeros(4 * len(streams[0]), np.uint8)
        np.left_shift(outside.view(np.uint8), np.uint8(1), out=codes[: len(values)])
        codes[: len(values)] |= (values >= 0).view(np.uint8)
        streams[0][:] = (
            codes[0::4] | codes[1::4] << np.uint8(2) | codes[2::4] << np.uint8(4) | codes[3::4] << np.uint8(6)
        )

    def decode(self, streams: Streams, blocks: BlockTable, out: Float) -> None:
        codes = np.empty((len(streams[0]), 4), np.uint8)
        for place in range(4):
            np.right_shift(streams[0], np.uint8(2 * place), out=codes[:, place])
        np.take(LEVELS, (codes & np.uint8(3)).reshape(-1)[: blocks.element_count], out=out)
        with np.errstate(over="ignore", invalid="ignore"):  # damaged scales; the caller looks for non-finite values
            blocks.apply(np.multiply, out, bf16_decode(as_uint16(streams[1])))


LEVELS = np.array([-INNER, INNER, -OUTER, OUTER], np.float32)
"""By code."""

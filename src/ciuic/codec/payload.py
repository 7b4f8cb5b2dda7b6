"""One fragment as ONE buffer: coded section, full-precision section, buffers.

coded    large matrices, by the codec          (packed values, then scales)
small    1-D parameters, routers, tensors under 4096 elements: bf16 (fp32 with codec `none`)
buffers  what training changes besides parameters: fp32
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ciuic.codec.bf16 import bf16_decode, bf16_encode
from ciuic.codec.blocks import build_blocks
from ciuic.codec.scalar import as_uint16, scalar_codec
from ciuic.errors import FrameError


@dataclass(frozen=True, kw_only=True)
class FragmentShape:
    """What a codec needs to know of a fragment."""

    rows: tuple[tuple[int, int], ...]
    """(row count, row length) of each coded tensor in storage order; one row when blocks may cross its rows."""
    small_count: int
    buffer_count: int

    @property
    def coded_count(self) -> int:
        return sum(count * length for count, length in self.rows)

    @property
    def element_count(self) -> int:
        """Elements of the fragment's flat fp32 vector: coded, small, buffers, in this order."""
        return self.coded_count + self.small_count + self.buffer_count


class FragmentCodec:
    """Encode and decode the flat fp32 vector [element_count] of a fragment."""

    def __init__(self, name: str, shape: FragmentShape) -> None:
        self.name = name
        self.shape = shape
        self.scalar = scalar_codec(name)
        self.blocks = build_blocks(shape.rows, self.scalar.max_block)
        self.coded_bytes = self.scalar.payload_bytes(self.blocks)
        self.payload_bytes = self.coded_bytes + self.scalar.small_bytes * shape.small_count + 4 * shape.buffer_count

    def encode(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Finite fp32 [element_count] -> bytes [payload_bytes]."""
        payload = np.empty(self.payload_bytes, np.uint8)
        coded, small = self.shape.coded_count, self.shape.coded_count + self.shape.small_count
        self.scalar.encode(values[:coded], self.blocks, payload[: self.coded_bytes])
        small_end = self.coded_bytes + self.scalar.small_bytes * self.shape.small_count
        middle = values[coded:small]
        small_section = bf16_encode(middle) if self.scalar.small_bytes == 2 else np.ascontiguousarray(middle)
        payload[self.coded_bytes : small_end] = small_section.view(np.uint8)
        payload[small_end:] = np.ascontiguousarray(values[small:]).view(np.uint8)
        return payload

    def decode(self, payload: NDArray[np.uint8], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Bytes [payload_bytes] -> fp32 [element_count]. Raises FrameError when the size is not the formula's."""
        self.check_size(len(payload))
        values = np.empty(self.shape.element_count, np.float32) if out is None else out
        coded, small = self.shape.coded_count, self.shape.coded_count + self.shape.small_count
        self.scalar.decode(payload[: self.coded_bytes], self.blocks, values[:coded])
        small_end = self.coded_bytes + self.scalar.small_bytes * self.shape.small_count
        section = payload[self.coded_bytes : small_end]
        if self.scalar.small_bytes == 2:
            values[coded:small] = bf16_decode(as_uint16(section))
        else:
            values[coded:small].view(np.uint8)[:] = section
        values[small:].view(np.uint8)[:] = payload[small_end:]
        return values

    def check_size(self, payload_bytes: int) -> None:
        """Refuse any size but the formula's, before memory is allocated."""
        if payload_bytes != self.payload_bytes:
            raise FrameError(
                f"the payload has {payload_bytes} bytes, {self.name} over this fragment has {self.payload_bytes}",
                cause="the sender has another layout, another codec, or the message was cut",
                next="check that both sides run the same job and version",
            )

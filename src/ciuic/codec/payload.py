"""One fragment as ONE buffer: coded section, full-precision section, buffers.

coded    large matrices, by the codec          (packed values, then scales)
small    1-D parameters, routers, tensors under 4096 elements: bf16 (fp32 with codec `none`)
buffers  what training changes besides parameters: fp32
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ciuic.codec.blocks import build_blocks
from ciuic.codec.dither import dither_keys
from ciuic.codec.names import CODEC_NAMES, scalar_codec
from ciuic.codec.native import section_engine
from ciuic.codec.section import Keys, Section
from ciuic.errors import CodecUnavailableError, FrameError


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
    """Encode and decode the flat fp32 vector [element_count] of a fragment. Threads may share one."""

    def __init__(
        self, name: str, shape: FragmentShape, *, back_end: str | None = None, threads: int | None = None
    ) -> None:
        """`back_end` as the environment variable CIUIC_CODEC; `threads` of the native kernel (None: by the machine).

        Raises CodecUnavailableError for a codec or a back end that cannot run here.
        """
        self.name = name
        self.shape = shape
        self.scalar = scalar_codec(name)
        self.blocks = build_blocks(shape.rows, self.scalar.max_block)
        self.sections = self._cut()
        self.coded_bytes = self.sections[0].payload_stop
        self.payload_bytes = self.sections[-1].payload_stop
        self._engines = [section_engine(section, back_end, threads) for section in self.sections]
        self._parts = [
            (engine, slice(section.payload_start, section.payload_stop), slice(section.start, section.stop))
            for engine, section in zip(self._engines, self.sections, strict=True)
            if section.stop > section.start
        ]
        """Where each section that has elements lies in payload and vector."""

    def encode(self, values: NDArray[np.float32], *, dither: int | None = None) -> NDArray[np.uint8]:
        """Finite fp32 [element_count] -> bytes [payload_bytes].

        `dither`: seed of stochastic rounding of the coded section, for int8 and int4: the mean over seeds is the
        input. It changes nothing for none and bf16; for other codecs it raises CodecUnavailableError.
        """
        keys = self.dither_keys(dither)
        payload = np.empty(self.payload_bytes, np.uint8)
        for section, engine in zip(self.sections, self._engines, strict=True):
            own = keys if section.codec.dithers else None
            engine.encode(
                values[section.start : section.stop], payload[section.payload_start : section.payload_stop], own
            )
        return payload

    def compress(
        self, minus_d: NDArray[np.float32], e: NDArray[np.float32], e_next: NDArray[np.float32]
    ) -> tuple[NDArray[np.uint8], int | None]:
        """Encode with error feedback in one pass: x = e - minus_d, payload = encode(x), e_next = x - decode(payload).

        All fp32 [element_count]; `e_next` is another buffer than the inputs, which stay as they are. Also returns the
        first element of x that is not finite or beyond LARGEST, or None; if there is one, payload and e_next are
        worthless.
        """
        payload = np.empty(self.payload_bytes, np.uint8)
        for section, engine in zip(self.sections, self._engines, strict=True):
            own = slice(section.start, section.stop)
            part = payload[section.payload_start : section.payload_stop]
            bad = engine.compress(minus_d[own], e[own], e_next[own], part)
            if bad is not None:
                return payload, section.start + bad
        return payload, None

    def decode(self, payload: NDArray[np.uint8], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Bytes [payload_bytes] -> fp32 [element_count]. Raises FrameError when the size is not the formula's."""
        self.check_size(len(payload))
        values = np.empty(self.shape.element_count, np.float32) if out is None else out
        for engine, coded, plain in self._parts:
            engine.decode(payload[coded], values[plain])
        return values

    def accumulate(self, payload: NDArray[np.uint8], weight: np.float32, out: NDArray[np.float32]) -> None:
        """out += weight * decoded, fp32 [element_count]; product and sum are each rounded once. Raises FrameError."""
        self.check_size(len(payload))
        for engine, coded, plain in self._parts:
            engine.accumulate(payload[coded], np.float32(weight), out[plain])

    def check_size(self, payload_bytes: int) -> None:
        """Refuse any size but the formula's, before memory is allocated."""
        if payload_bytes != self.payload_bytes:
            raise FrameError(
                f"the payload has {payload_bytes} bytes, {self.name} over this fragment has {self.payload_bytes}",
                cause="the sender has another layout, another codec, or the message was cut",
                next="check that both sides run the same job and version",
            )

    def dither_keys(self, seed: int | None) -> Keys | None:
        """The keys of a seed where this codec can use them. Raises CodecUnavailableError where it must not be given."""
        if seed is None or self.scalar.nearly_exact:
            return None
        if not self.scalar.dithers:
            raise CodecUnavailableError(
                f"codec {self.name!r} cannot round stochastically",
                cause="only int8 and int4 have levels at equal distances",
                next="use int4 or int8 without feedback, or this codec with feedback",
            )
        return dither_keys(seed)

    def _cut(self) -> tuple[Section, Section, Section]:
        number = CODEC_NAMES.index(self.name)
        coded = Section(codec=self.scalar, number=number, blocks=self.blocks, start=0, payload_start=0)
        small = _plain("bf16" if self.scalar.small_bytes == 2 else "none", self.shape.small_count, coded)
        return coded, small, _plain("none", self.shape.buffer_count, small)


def _plain(name: str, count: int, before: Section) -> Section:
    """A section without scales, after another one."""
    codec = scalar_codec(name)
    return Section(
        codec=codec,
        number=CODEC_NAMES.index(name),
        blocks=build_blocks(((1, count),), codec.max_block),
        start=before.stop,
        payload_start=before.payload_stop,
    )

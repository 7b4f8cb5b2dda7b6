"""One stretch of a fragment with one codec, and the numpy way to work on it: span after span, inside the cache."""

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ciuic.codec.blocks import BlockTable, Span, cut_spans
from ciuic.codec.dither import uniform_noise
from ciuic.codec.finite import first_non_finite
from ciuic.codec.scalar import Bytes, Float, OneBitCodec, ScalarCodec, Streams

SPAN_ELEMENTS = 1 << 17
"""A few vectors of so many fp32 stay in a second-level cache."""

Keys = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Elements start..stop of a fragment are bytes payload_start..payload_stop of its payload."""

    codec: ScalarCodec
    number: int
    """The codec's number in kernel.c."""
    blocks: BlockTable
    start: int
    payload_start: int

    @property
    def stop(self) -> int:
        return self.start + self.blocks.element_count

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each stream."""
        blocks = self.blocks
        return self.codec.sizes(blocks.element_count, blocks.block_count, int(blocks.kept.sum()))

    @property
    def payload_stop(self) -> int:
        return self.payload_start + sum(self.sizes)

    def streams_of(self, span: Span, payload: Bytes) -> Streams:
        """The parts of this section's payload that belong to a span."""
        begins = self.codec.sizes(span.start, span.first_block, span.kept_start)
        own = self.codec.sizes(span.blocks.element_count, span.blocks.block_count, int(span.blocks.kept.sum()))
        streams, at = [], 0
        for begin, length, whole in zip(begins, own, self.sizes, strict=True):
            streams.append(payload[at + begin : at + begin + length])
            at += whole
        return tuple(streams)


class SectionEngine(Protocol):
    """Works on one section. All vectors and payloads are those of the section alone."""

    def encode(self, values: Float, payload: Bytes, keys: Keys | None) -> None:
        """Fill the payload; with keys by stochastic rounding."""
        ...

    def compress(self, minus_d: Float, e: Float, e_next: Float, payload: Bytes) -> int | None:
        """x = e - minus_d into the payload, e_next = x - decoded. Returns the first bad element or None."""
        ...

    def decode(self, payload: Bytes, out: Float) -> None:
        """out = decoded."""
        ...

    def accumulate(self, payload: Bytes, weight: np.float32, out: Float) -> None:
        """out += weight * decoded, each operation rounded."""
        ...


class NumpyEngine:
    """The back end that runs everywhere. Scratch belongs to a thread, so that threads may share a codec."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._spans = cut_spans(section.blocks, SPAN_ELEMENTS)
        self._longest = max((span.blocks.element_count for span in self._spans), default=0)
        self._local = threading.local()

    def encode(self, values: Float, payload: Bytes, keys: Keys | None) -> None:
        for span in self._spans:
            noise = None if keys is None else uniform_noise(span.start, span.blocks.element_count, keys)
            streams = self._section.streams_of(span, payload)
            self._section.codec.encode(values[span.start : span.stop], span.blocks, streams, noise)

    def compress(self, minus_d: Float, e: Float, e_next: Float, payload: Bytes) -> int | None:
        codec = self._section.codec
        for span in self._spans:
            x, decoded = self._scratch(span.blocks.element_count)
            with np.errstate(over="ignore", invalid="ignore"):
                np.subtract(e[span.start : span.stop], minus_d[span.start : span.stop], out=x)
            out, streams = e_next[span.start : span.stop], self._section.streams_of(span, payload)
            if isinstance(codec, OneBitCodec) and codec.residual(x, span.blocks, streams, out):
                continue
            bad = first_non_finite(x)
            if bad is not None:
                return span.start + bad
            codec.encode(x, span.blocks, streams)
            codec.decode(streams, span.blocks, decoded)
            np.subtract(x, decoded, out=out)
        return None

    def decode(self, payload: Bytes, out: Float) -> None:
        for span in self._spans:
            streams = self._section.streams_of(span, payload)
            self._section.codec.decode(streams, span.blocks, out[span.start : span.stop])

    def accumulate(self, payload: Bytes, weight: np.float32, out: Float) -> None:
        for span in self._spans:
            _, decoded = self._scratch(span.blocks.element_count)
            self._section.codec.decode(self._section.streams_of(span, payload), span.blocks, decoded)
            with np.errstate(over="ignore", invalid="ignore"):
                decoded *= weight
                out[span.start : span.stop] += decoded

    def _scratch(self, count: int) -> tuple[Float, Float]:
        both = getattr(self._local, "both", None)
        if both is None:
            both = self._local.both = np.empty((2, self._longest), np.float32)
        return both[0, :count], both[1, :count]

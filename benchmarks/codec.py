"""How fast the codecs are, as fp32 input per second, beside copying the same memory."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from ciuic.codec import CODEC_NAMES, FragmentCodec, FragmentShape

ROWS, ROW_LENGTH, SMALL = 1024, 4096, 20_000
ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class CodecResult:
    """One codec; the reference is numpy's copy of the same vector, measured between the codec's own rounds."""

    name: str
    bits_per_parameter: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    memcpy_bytes_per_s: float

    @property
    def encode_to_memcpy(self) -> float:
        """1 would be as fast as copying."""
        return self.encode_bytes_per_s / self.memcpy_bytes_per_s

    @property
    def decode_to_memcpy(self) -> float:
        """1 would be as fast as copying."""
        return self.decode_bytes_per_s / self.memcpy_bytes_per_s

    def as_dict(self) -> dict[str, object]:
        """For JSON, ratios included."""
        ratios = {"encode_to_memcpy": self.encode_to_memcpy, "decode_to_memcpy": self.decode_to_memcpy}
        return {**asdict(self), **ratios}


def measure_codecs() -> list[CodecResult]:
    """All codecs on one vector of about four million normal numbers; the best of several interleaved rounds."""
    shape = FragmentShape(rows=((ROWS, ROW_LENGTH),), small_count=SMALL, buffer_count=0)
    values = np.random.default_rng(0).standard_normal(shape.element_count, dtype=np.float32)
    return [_measure(name, shape, values) for name in CODEC_NAMES]


def _measure(name: str, shape: FragmentShape, values: np.ndarray) -> CodecResult:
    codec, target = FragmentCodec(name, shape), np.empty_like(values)
    payload = codec.encode(values)
    steps: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(values),
        "decode": lambda: codec.decode(payload, target),
        "memcpy": lambda: np.copyto(target, values),
    }
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for what, step in steps.items():
            began = time.perf_counter()
            step()
            best[what] = min(best[what], time.perf_counter() - began)
    return CodecResult(
        name=name,
        bits_per_parameter=8 * len(payload) / len(values),
        encode_bytes_per_s=values.nbytes / best["encode"],
        decode_bytes_per_s=values.nbytes / best["decode"],
        memcpy_bytes_per_s=values.nbytes / best["memcpy"],
    )

"""How fast the codecs are on this machine: measured once per process, in a fraction of a second."""

import time
from collections.abc import Callable
from functools import cache

import numpy as np

from ciuic.codec import CODEC_NAMES, FragmentCodec, FragmentShape
from ciuic.plan.facts import CodecSpeed, CodecSpeeds

ELEMENTS = 1 << 20
_REPEATS = 2


@cache
def measure_codec_speeds(elements: int = ELEMENTS) -> CodecSpeeds:
    """Encode and decode speed of every codec on one fragment of `elements` values; the best of two."""
    values = np.random.default_rng(0).standard_normal(elements, np.float32)
    shape = FragmentShape(rows=((1, elements),), small_count=0, buffer_count=0)
    return CodecSpeeds(by_name={name: _measure(FragmentCodec(name, shape), values) for name in CODEC_NAMES})


def _measure(codec: FragmentCodec, values: np.ndarray) -> CodecSpeed:
    payload, out = codec.encode(values), np.empty_like(values)
    return CodecSpeed(
        encode_bytes_per_s=values.nbytes / _best_s(lambda: codec.encode(values)),
        decode_bytes_per_s=values.nbytes / _best_s(lambda: codec.decode(payload, out)),
    )


def _best_s(work: Callable[[], object]) -> float:
    """Processor time of this thread: a busy machine does not look slow. At least the clock's resolution."""
    taken = []
    for _ in range(_REPEATS):
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return max(min(taken), 1e-6)

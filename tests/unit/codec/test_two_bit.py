import numpy as np
import pytest
from codec_cases import BACK_ENDS, codec_of, shape_of, vector

from ciuic.codec.bf16 import bf16_decode
from ciuic.codec.two_bit import INNER, LEVELS, MIDDLE, OUTER

EVERY = pytest.mark.parametrize("back_end", BACK_ENDS)


def test_the_levels_are_those_of_lloyd_and_max_for_a_normal_distribution() -> None:
    assert pytest.approx(0.4528, abs=0.0004) == INNER
    assert pytest.approx(1.5104, abs=0.003) == OUTER
    assert (INNER + OUTER) / 2 == MIDDLE


def test_every_level_times_every_scale_is_exact() -> None:
    scales = bf16_decode(np.arange(0x0400, 0x7F00, dtype=np.uint16))
    for level in LEVELS:
        assert np.array_equal((scales * level).astype(np.float64), scales.astype(np.float64) * float(level))


@EVERY
def test_the_error_on_normal_numbers_is_what_four_levels_can_reach(back_end: str) -> None:
    values = vector("normal", 1 << 18)
    codec = codec_of(back_end, "2-bit", shape_of((1, 1 << 18)))
    decoded = codec.decode(codec.encode(values)).astype(np.float64)
    assert np.mean((values - decoded) ** 2) == pytest.approx(0.1175, abs=0.002)


@EVERY
def test_one_spike_among_zeros_is_a_contraction(back_end: str) -> None:
    values = np.zeros(256, np.float32)
    values[3] = 1
    codec = codec_of(back_end, "2-bit", shape_of((1, 256)))
    decoded = codec.decode(codec.encode(values))
    assert np.linalg.norm(values - decoded) < 0.99  # with the rms as the scale it is 1.012


@EVERY
def test_equal_magnitudes_come_back(back_end: str) -> None:
    values = np.where(vector("normal", 1000) > 0, np.float32(OUTER), np.float32(-OUTER))
    codec = codec_of(back_end, "2-bit", shape_of((1, 1000)))
    assert np.array_equal(codec.decode(codec.encode(values)), values)

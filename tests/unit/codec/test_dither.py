"""Stochastic rounding: right on average, equal everywhere, and refused where it would be wrong."""

import numpy as np
import pytest
from codec_cases import BACK_ENDS, codec_of, shape_of, vector
from hypothesis import given
from hypothesis import strategies as st

from ciuic.codec import FragmentCodec
from ciuic.codec.dither import dither_keys, uniform_noise
from ciuic.errors import CodecUnavailableError

EVERY = pytest.mark.parametrize("back_end", BACK_ENDS)


def test_the_noise_is_uniform_and_never_0_or_1() -> None:
    noise = uniform_noise(0, 200_000, dither_keys(1)).astype(np.float64)
    assert 0 < noise.min() < 1e-4
    assert 1 - 1e-4 < noise.max() < 1
    assert abs(noise.mean() - 0.5) < 0.003
    assert np.histogram(noise, 20, (0, 1))[0].std() < 300  # 100 is expected


def test_the_noise_of_neighbours_and_of_seeds_is_not_alike() -> None:
    first, second = (uniform_noise(0, 50_000, dither_keys(seed)) for seed in (7, 8))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], second[:-1])[0, 1]) < 0.02


@given(start=st.integers(0, 2**33), count=st.integers(0, 50), seed=st.integers(-(2**70), 2**70))
def test_the_noise_of_an_element_does_not_depend_on_where_a_span_begins(start: int, count: int, seed: int) -> None:
    whole = uniform_noise(start, count + 5, dither_keys(seed))
    assert np.array_equal(uniform_noise(start + 5, count, dither_keys(seed)), whole[5:])


@EVERY
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_the_mean_over_seeds_is_the_input(name: str, back_end: str) -> None:
    shape, rounds = shape_of((1, 300)), 2000
    values = vector("normal", 300)
    codec = codec_of(back_end, name, shape)
    total = np.zeros(300)
    for seed in range(rounds):
        total += codec.decode(codec.encode(values, dither=seed))
    step = np.abs(values).max() / {"int4": 7, "int8": 127}[name]
    assert np.abs(total / rounds - values).max() < 4.5 * 0.5 * step / rounds**0.5


@EVERY
def test_the_largest_value_of_a_block_is_not_cut_off_on_average(back_end: str) -> None:
    values = np.array([1.0039, 0.3], np.float32)  # rounding the scale to nearest would lose a part of it every time
    codec = codec_of(back_end, "int4", shape_of((1, 2)))
    total = sum(codec.decode(codec.encode(values, dither=seed)) for seed in range(4000))
    assert abs(total[0] / 4000 - values[0]) < 0.001


@EVERY
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_whole_multiples_of_the_scale_stay_what_they_are(name: str, back_end: str) -> None:
    levels = {"int4": 7, "int8": 127}[name]
    values = np.arange(-levels, levels + 1, dtype=np.float32) * np.float32(0.5)
    codec = codec_of(back_end, name, shape_of((1, len(values))))
    for seed in range(50):
        assert np.array_equal(codec.decode(codec.encode(values, dither=seed)), values)


@EVERY
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(back_end: str) -> None:
    codec = codec_of(back_end, "int4", shape_of((1, 5000)))
    values = vector("normal", 5000)
    first = codec.encode(values, dither=3)
    assert np.array_equal(codec.encode(values, dither=3), first)
    assert not np.array_equal(codec.encode(values, dither=4), first)
    assert not np.array_equal(codec.encode(values), first)


@pytest.mark.parametrize("name", ["none", "bf16"])
def test_full_precision_needs_no_dither(name: str) -> None:
    values = vector("normal", 100)
    codec = FragmentCodec(name, shape_of((1, 100)))
    assert np.array_equal(codec.encode(values, dither=1), codec.encode(values))


@pytest.mark.parametrize("name", ["2-bit", "1-bit", "topk"])
def test_codecs_whose_levels_are_not_evenly_spaced_refuse_it(name: str) -> None:
    with pytest.raises(CodecUnavailableError, match="cannot round stochastically"):
        FragmentCodec(name, shape_of((1, 100))).encode(np.zeros(100, np.float32), dither=1)

"""What makes error feedback work: the error is smaller than what was encoded, and everything moves."""

import numpy as np
import pytest
from codec_cases import block_lengths, fragments, shape_of, vector
from hypothesis import given
from hypothesis import strategies as st

from ciuic.codec import CODEC_NAMES, FragmentCodec, FragmentShape
from ciuic.codec.names import scalar_codec

NORMAL_SCALE = 1.2e-38
"""Scales below the smallest normal number lose bits; the contraction still holds there, the step bound does not."""


def blocks_of(name: str, shape: FragmentShape, *vectors: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """The coded sections of these vectors, cut into scale blocks, in float64."""
    ends = np.cumsum(block_lengths(shape.rows, scalar_codec(name).max_block))
    cut = [np.split(v[: shape.coded_count].astype(np.float64), ends[:-1]) for v in vectors]
    return list(zip(*cut, strict=True)) if len(ends) else []


@given(name=st.sampled_from(CODEC_NAMES), case=fragments())
def test_the_error_of_each_block_is_not_larger_than_the_block(
    name: str, case: tuple[FragmentShape, np.ndarray]
) -> None:
    shape, values = case
    codec = FragmentCodec(name, shape)
    for x, q in blocks_of(name, shape, values, codec.decode(codec.encode(values))):
        assert np.linalg.norm(x - q) <= np.linalg.norm(x) * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["heavy tail", "sparse", "mixed"])
def test_one_bit_contracts_on_heavy_tails_where_an_l2_scale_would_not(kind: str) -> None:
    shape = shape_of((1, 4096))
    x = vector(kind, 4096, 1).astype(np.float64)
    codec = FragmentCodec("1-bit", shape)
    q = codec.decode(codec.encode(x.astype(np.float32))).astype(np.float64)
    scale = np.sqrt(np.mean(x * x))
    with_l2 = np.where(x >= 0, scale, -scale)
    assert np.linalg.norm(x - q) < np.linalg.norm(x) < np.linalg.norm(x - with_l2)


@given(case=fragments())
def test_one_bit_moves_every_element_of_a_block_that_is_not_zero(case: tuple[FragmentShape, np.ndarray]) -> None:
    shape, values = case
    codec = FragmentCodec("1-bit", shape)
    for x, q in blocks_of("1-bit", shape, values, codec.decode(codec.encode(values))):
        mean = np.abs(x).mean()
        if mean >= NORMAL_SCALE:
            assert q.all()
            assert np.abs(np.abs(q) - mean).max() <= mean * 2**-8
            assert np.array_equal(q > 0, x >= 0)
        elif not x.any():
            assert not q.any()


@given(case=fragments(), name=st.sampled_from(["int8", "int4"]))
def test_integers_are_at_most_half_a_step_away(case: tuple[FragmentShape, np.ndarray], name: str) -> None:
    shape, values = case
    levels = {"int8": 127, "int4": 7}[name]
    codec = FragmentCodec(name, shape)
    for x, q in blocks_of(name, shape, values, codec.decode(codec.encode(values))):
        step = np.abs(x).max() / levels
        if step >= NORMAL_SCALE:
            assert np.abs(x - q).max() <= 0.5 * step * (1 + 2**-7)
            assert len(np.unique(q)) <= 2 * levels + 1


@given(case=fragments())
def test_bf16_is_the_nearest_of_its_numbers(case: tuple[FragmentShape, np.ndarray]) -> None:
    shape, values = case
    codec = FragmentCodec("bf16", shape)
    for x, q in blocks_of("bf16", shape, values, codec.decode(codec.encode(values))):
        assert (np.abs(x - q) <= np.maximum(np.abs(x) * 2**-8, 5e-41)).all()


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("none", 2), ("bf16", 100), ("int8", 100), ("int4", 100), ("2-bit", 400), ("1-bit", 1600), ("topk", 1600)],
)
def test_with_feedback_the_mean_of_many_rounds_is_the_true_gradient(name: str, rounds: int) -> None:
    shape = shape_of((2, 300), (1, 500), small=7, buffers=3)
    codec = FragmentCodec(name, shape)
    x = vector("normal", shape.element_count, 3)
    residual, total = np.zeros_like(x), np.zeros(len(x))
    for _ in range(rounds):
        y = x + residual
        q = codec.decode(codec.encode(y))
        residual = y - q
        total += q
    largest = np.abs(x).max()
    assert np.abs(total / rounds - x).max() <= 0.1 * largest
    assert np.abs(total + residual - rounds * x.astype(np.float64)).max() <= 1e-4 * rounds * largest


def test_minus_zero_counts_as_positive_for_the_bit_and_for_the_error() -> None:
    codec = FragmentCodec("1-bit", shape_of((1, 4)))
    values = np.array([-0.0, 0.0, 2.0, -2.0], np.float32)
    assert codec.decode(codec.encode(values)).tolist() == [1.0, 1.0, 1.0, -1.0]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 4095, 4097, 10_001])
def test_padding_bits_do_not_change_the_mean(count: int) -> None:
    codec = FragmentCodec("1-bit", shape_of((1, count)))
    assert set(codec.decode(codec.encode(np.full(count, -1.5, np.float32))).tolist()) == {-1.5}

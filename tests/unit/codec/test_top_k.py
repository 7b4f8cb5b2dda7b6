import numpy as np
import pytest
from codec_cases import BACK_ENDS, KINDS, block_lengths, codec_of, shape_of, vector
from hypothesis import given
from hypothesis import strategies as st

from ciuic.codec.top_k import pack_indices, unpack_indices

EVERY = pytest.mark.parametrize("back_end", BACK_ENDS)


def largest(block: np.ndarray) -> set[int]:
    """What top-k must keep, written down naively."""
    order = sorted(range(len(block)), key=lambda i: (-abs(float(block[i])), i))
    return set(order[: -(-len(block) // 64)])


@EVERY
@given(
    rows=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 5, 63, 64, 65, 300, 4096, 4097])), max_size=3),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_the_largest_of_each_block_are_kept_and_nothing_else(
    back_end: str, rows: list[tuple[int, int]], kind: str, seed: int
) -> None:
    shape = shape_of(*rows)
    values = vector(kind, shape.element_count, seed)
    codec = codec_of(back_end, "topk", shape)
    decoded, start = codec.decode(codec.encode(values)), 0
    for length in block_lengths(shape.rows, 4096):
        keep = largest(values[start : start + length])
        assert set(np.flatnonzero(decoded[start : start + length]).tolist()) <= keep
        start += length


@EVERY
def test_the_two_levels_are_the_means_of_the_two_groups_and_the_signs_are_kept(back_end: str) -> None:
    values = np.zeros(128, np.float32)
    values[[5, 9]] = -1, 3
    codec = codec_of(back_end, "topk", shape_of((1, 128)))
    assert np.array_equal(codec.decode(codec.encode(values)), values)
    wide = np.zeros(256, np.float32)
    wide[[0, 1, 2, 200]] = 1, -2, 10, -12
    expected = np.zeros(256, np.float32)
    expected[[0, 1, 2, 200]] = 1.5, -1.5, 11, -11
    codec = codec_of(back_end, "topk", shape_of((1, 256)))
    assert np.array_equal(codec.decode(codec.encode(wide)), expected)


@EVERY
def test_of_equal_magnitudes_the_first_are_kept(back_end: str) -> None:
    codec = codec_of(back_end, "topk", shape_of((1, 4096)))
    values = np.where(np.arange(4096) % 2, np.float32(-0.5), np.float32(0.5))
    decoded = codec.decode(codec.encode(values))
    assert np.array_equal(decoded[:64], values[:64])
    assert not decoded[64:].any()


@EVERY
def test_a_few_spikes_among_zeros_move_no_zero(back_end: str) -> None:
    values = np.zeros(4096, np.float32)
    values[[7, 1000, 4095]] = 1, -1, 1
    codec = codec_of(back_end, "topk", shape_of((1, 4096)))
    assert np.array_equal(codec.decode(codec.encode(values)), values)


@EVERY
@pytest.mark.parametrize("kind", ["few", "hidden from the sample"])
def test_a_misleading_sample_costs_time_and_nothing_else(kind: str, back_end: str) -> None:
    values = np.full(4096, 1e-3, np.float32)
    values[::16] = 5 if kind == "few" else 0  # the sample looks at every 16th
    values[1:40] = 1
    codec = codec_of(back_end, "topk", shape_of((1, 4096)))
    assert set(np.flatnonzero(codec.decode(codec.encode(values))).tolist()) == largest(values)


@EVERY
def test_an_index_that_does_not_ascend_or_lies_outside_is_dropped(back_end: str) -> None:
    codec = codec_of(back_end, "topk", shape_of((1, 300)))
    payload = codec.encode(np.arange(300, dtype=np.float32))
    for places, kept in [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        ([9, 9, 3, 9, 10], [9, 10]),
        ([299, 300, 4095, 7, 8], [299]),
        ([4095, 1, 2, 3, 4], []),
    ]:
        payload[:8] = pack_indices(np.array(places))
        assert np.flatnonzero(codec.decode(payload)).tolist() == kept


@given(places=st.lists(st.integers(0, 4095), max_size=20))
def test_twelve_bits_come_back(places: list[int]) -> None:
    packed = pack_indices(np.array(places, np.int64))
    assert len(packed) == -(-12 * len(places) // 8)
    assert unpack_indices(packed, len(places)).tolist() == places

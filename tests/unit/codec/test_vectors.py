import numpy as np
import pytest
from codec_cases import shape_of
from hypothesis import given
from hypothesis import strategies as st

from ciuic.codec import FragmentCodec, NumpyVectors
from ciuic.codec.vectors import first_non_finite

BAD = [np.inf, -np.inf, np.nan]


@given(count=st.integers(1, 200), place=st.integers(0, 199), bad=st.sampled_from(BAD), scale=st.sampled_from([1, 1e25]))
def test_the_first_value_that_is_not_finite_is_found(count: int, place: int, bad: float, scale: float) -> None:
    values = np.linspace(-scale, scale, count, dtype=np.float32)
    assert first_non_finite(values) is None
    values[place % count :] = bad
    assert first_non_finite(values) == place % count


@pytest.mark.parametrize("large", [1.3e30, -3e38])
def test_a_value_whose_sums_would_overflow_counts_as_not_finite(large: float) -> None:
    assert first_non_finite(np.array([1, 1e30, large], np.float32)) == 2


def test_an_overflow_of_the_square_sum_is_told_from_values_that_are_not_finite() -> None:
    assert first_non_finite(np.full(5, 1e25, np.float32)) is None
    assert first_non_finite(np.zeros(0, np.float32)) is None


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_value_among_a_million_is_found(bad: float) -> None:
    values = np.zeros(1_000_000, np.float32)
    values[999_999] = bad
    assert first_non_finite(values) == 999_999


def test_vectors_on_the_host_copy_what_comes_in() -> None:
    vectors = NumpyVectors()
    given_ = np.arange(3, dtype=np.float32)
    taken, copied = vectors.from_host(given_), vectors.copy(given_)
    given_[:] = 9
    assert taken.tolist() == copied.tolist() == [0, 1, 2]
    assert vectors.to_host(taken) is taken
    assert vectors.zeros(3).tolist() == [0, 0, 0]
    assert isinstance(vectors.codec("int8", shape_of((1, 3))), FragmentCodec)

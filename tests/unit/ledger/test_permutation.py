"""The global order of samples: a bijection, another one each epoch, the same everywhere, and it looks shuffled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic.ledger.permutation import Permutation


def epoch_of(permutation: Permutation, epoch: int = 0) -> np.ndarray:
    size = permutation.size
    return permutation(np.arange(epoch * size, (epoch + 1) * size))


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 4096, 4097, 5000])
def test_every_epoch_holds_each_sample_once(size: int) -> None:
    permutation = Permutation(size, seed=7)
    for epoch in range(3):
        assert np.array_equal(np.sort(epoch_of(permutation, epoch)), np.arange(size))


@settings(max_examples=60)
@given(size=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**30))
def test_any_epoch_of_any_size_and_seed_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_of(Permutation(size, seed), epoch)), np.arange(size))


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**32), numbers=st.lists(st.integers(0, 20_000), max_size=30))
def test_one_sample_is_found_without_the_others(size: int, seed: int, numbers: list[int]) -> None:
    samples = np.array(numbers, np.int64)
    together = Permutation(size, seed)(samples)
    alone = [int(Permutation(size, seed)(samples[i : i + 1])[0]) for i in range(len(samples))]
    assert together.tolist() == alone
    assert samples.tolist() == numbers  # not changed


def test_the_order_is_the_same_in_every_version_of_ciuic() -> None:
    assert epoch_of(Permutation(10, seed=0)).tolist() == [4, 0, 6, 7, 5, 3, 8, 1, 2, 9]


@pytest.mark.parametrize("size", [100, 1000, 5000])
def test_epochs_and_seeds_differ(size: int) -> None:
    orders = [epoch_of(Permutation(size, seed), epoch) for seed in range(4) for epoch in range(4)]
    for i, left in enumerate(orders):
        for right in orders[:i]:
            assert (left == right).mean() < 0.1


@pytest.mark.parametrize("size", [1000, 4096, 5000])
@pytest.mark.parametrize("seed", range(5))
def test_the_order_looks_shuffled(size: int, seed: int) -> None:
    order = epoch_of(Permutation(size, seed)).astype(np.int64)
    steps = np.diff(order)
    assert (np.abs(steps) == 1).mean() < 0.02, "neighbours stay together"
    rises = steps > 0
    changes = np.flatnonzero(np.diff(rises)) + 1
    assert np.diff(np.concatenate([[0], changes, [len(rises)]])).max() < 12, "a long run in one direction"
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.12
    assert (order == np.arange(size)).sum() < 10
    halves = order[: size // 2] < size // 2
    assert abs(halves.mean() - 0.5) < 0.08


def test_a_large_data_set_needs_no_memory() -> None:
    permutation = Permutation(10**12, seed=3)
    samples = permutation(np.arange(0, 10**12, 10**8))
    assert len(np.unique(samples)) == 10_000
    assert samples.max() < 10**12
    assert abs(samples.mean() / 10**12 - 0.5) < 0.02


@pytest.mark.parametrize("size", [0, -1])
def test_a_permutation_of_nothing_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Permutation(size, seed=0)

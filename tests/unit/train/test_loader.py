"""A loader of leased samples: each once, in the run's order, each rank its part."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ciuic.errors import TrainingLoopError
from ciuic.ledger.intervals import Range
from ciuic.ledger.permutation import Permutation
from ciuic.train.leases import Leases
from ciuic.train.loader import (
    LeasedBatches,
    LeasedLoader,
    LeaseSource,
    check_loader,
    dataset_samples,
    to_numbers,
    to_ranges,
)

NUMBERS = st.lists(st.integers(0, 200), max_size=40)


class Numbers(Dataset[int]):
    """A data set whose samples are their own indices."""

    def __init__(self, size: int = 100) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Endless(Dataset[int]):
    """Addressed by number, without a length: a stream."""

    def __getitem__(self, index: int) -> int:
        return index


class Session:
    """What a Run is to its loader: gives what is leased, in portions, and remembers what was trained."""

    def __init__(self, portions: list[list[Range]], batch: int) -> None:
        self.leases = Leases("r1", 1, chunk=1, ahead=0)
        self.portions, self.batch = portions, batch
        self.took: list[tuple[list[Range], int]] = []
        self.finished = 0

    def take(self) -> torch.Tensor:
        return to_numbers(self.leases.take(self.batch))

    def wait(self) -> bool:
        if not self.portions:
            return False
        self.leases.put_back(self.portions.pop(0))
        return True

    def source(self) -> LeaseSource:
        return LeaseSource(take=self.take, wait=self.wait, took=self._took, finish=self._finish)

    def _took(self, ranges: list[Range], tokens: int, seconds: float) -> None:
        assert seconds >= 0
        self.took.append((ranges, tokens))

    def _finish(self) -> None:
        self.finished += 1

    @property
    def trained(self) -> list[int]:
        return [n for ranges, _ in self.took for start, stop in ranges for n in range(start, stop)]


def loader_of(session: Session, loader: DataLoader[Any], *, place: tuple[int, int] = (0, 1)) -> LeasedLoader:
    return LeasedLoader(loader, session.source(), place=place, seed=5)


def samples(batches: Iterator[Any] | LeasedLoader) -> list[int]:
    return [int(n) for batch in batches for n in batch]


# ---- numbers and ranges


@given(numbers=NUMBERS)
def test_ranges_of_numbers_are_those_numbers_in_that_order(numbers: list[int]) -> None:
    ranges = to_ranges(torch.tensor(numbers, dtype=torch.int64))
    assert to_numbers(ranges).tolist() == numbers
    assert all(start < stop for start, stop in ranges)


@given(ranges=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)).map(lambda r: (r[0], r[0] + r[1])), max_size=9))
def test_numbers_of_ranges_are_those_ranges_joined_where_they_touch(ranges: list[Range]) -> None:
    again = to_ranges(to_numbers(ranges))
    assert to_numbers(again).tolist() == to_numbers(ranges).tolist()
    assert len(again) <= len(ranges)
    assert all(left[1] != right[0] for left, right in itertools.pairwise(again))


def test_no_samples_are_no_numbers() -> None:
    assert to_numbers([]).dtype == torch.int64
    assert to_ranges(to_numbers([])) == []


# ---- batches


def indices(numbers: list[int], rank: int, ranks: int, order: Permutation | None = None) -> list[list[int]]:
    portions = [torch.tensor(numbers, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)]
    return list(LeasedBatches(lambda: portions.pop(0), order, (rank, ranks)))


@given(numbers=st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True), ranks=st.integers(1, 4))
def test_the_ranks_of_a_node_share_a_batch_and_leave_nothing_out(numbers: list[int], ranks: int) -> None:
    parts = [indices(numbers, rank, ranks)[0] for rank in range(ranks)]
    together = [n for part in parts[: len(numbers)] for n in part]
    assert sorted(together) == sorted(numbers)
    assert all(parts), "every rank must make its step"
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_a_batch_is_permuted_into_the_data_set_by_epoch() -> None:
    order = Permutation(10, seed=3)
    numbers = [8, 9, 10, 11, 25]
    assert indices(numbers, 0, 1, order)[0] == order(np.array(numbers)).tolist()


# ---- the loader


@pytest.mark.parametrize("workers", [0, 2])
def test_each_leased_sample_is_trained_once_over_two_epochs_and_in_many_portions(workers: int) -> None:
    portions = [[(0, 7)], [(7, 30), (40, 41)], [(30, 40)], [(41, 100)], [(100, 200)]]
    session = Session(portions, batch=8)
    loader = loader_of(session, DataLoader(Numbers(100), batch_size=8, num_workers=workers))
    order = Permutation(100, seed=5)
    seen = samples(loader)
    assert sorted(seen[:100]) == list(range(100)), "the first epoch holds each sample once"
    assert sorted(seen[100:]) == list(range(100))
    assert sorted(session.trained) == list(range(200))
    assert seen == order(np.array(session.trained)).tolist(), "what is reported is what was yielded"
    assert [tokens for _, tokens in session.took] == [sum(b - a for a, b in ranges) for ranges, _ in session.took]
    assert session.finished == 1
    assert samples(loader) == [], "the run is over"
    assert session.finished == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_broken_off_goes_on_where_it_stopped(workers: int) -> None:
    session = Session([[(0, 40)], [(40, 100)]], batch=5)
    loader = loader_of(session, DataLoader(Numbers(100), batch_size=5, num_workers=workers))
    seen: list[int] = []
    for _ in range(4):
        for number, batch in enumerate(loader):
            seen += [int(n) for n in batch]
            if number == 2:
                break
    seen += samples(loader)
    assert sorted(seen) == list(range(100))
    assert seen == Permutation(100, seed=5)(np.array(session.trained)).tolist()


@settings(max_examples=25)
@given(portions=st.lists(st.integers(1, 30), min_size=1, max_size=6), ranks=st.integers(1, 3), batch=st.integers(1, 9))
def test_the_ranks_of_a_node_together_train_each_sample(portions: list[int], ranks: int, batch: int) -> None:
    ends = np.cumsum([0, *portions]).tolist()
    seen: list[int] = []
    steps: set[int] = set()
    for rank in range(ranks):
        leased = [[(a, b)] for a, b in itertools.pairwise(ends)]
        session = Session(leased, batch=batch * ranks)
        loader = loader_of(session, DataLoader(Numbers(400), batch_size=batch), place=(rank, ranks))
        seen += samples(loader)
        steps.add(len(session.took))
        assert session.trained == list(range(ends[-1])), "each rank knows the samples of the whole node"
    assert len(steps) == 1, "all ranks make the same steps"
    assert set(seen) == set(Permutation(400, seed=5)(np.arange(ends[-1])).tolist())


def test_a_stream_is_read_by_sample_number() -> None:
    session = Session([[(0, 3)], [(1000, 1003)]], batch=4)
    loader = loader_of(session, DataLoader(Endless(), batch_size=4, sampler=[0]))
    assert dataset_samples(loader.loader) == 0
    assert samples(loader) == [0, 1, 2, 1000, 1001, 1002]


def test_the_users_own_settings_stay() -> None:
    def collate(items: list[int]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(items)[:, None].repeat(1, 3)}

    session = Session([[(0, 4)]], batch=4)
    source = DataLoader(Numbers(), batch_size=4, collate_fn=collate, shuffle=True)
    loader = loader_of(session, source)
    assert [batch["input_ids"].shape for batch in loader] == [(4, 3)]
    assert session.took[0][1] == 12, "tokens are counted in the batch"
    assert loader.batch_size == 4
    assert loader.dataset is source.dataset
    assert dataset_samples(source) == 100


# ---- what cannot be leased


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        ([1, 2, 3], "needs a torch DataLoader, not list"),
        (iter(DataLoader(Numbers())), "not _SingleProcessDataLoaderIter"),
        (DataLoader(Stream()), "cannot be read by sample number"),
        (DataLoader(Numbers(), batch_sampler=[[0, 1]]), "has no batch_size"),
        (DataLoader(Numbers(), batch_size=None), "has no batch_size"),
    ],
    ids=["a list", "an iterator", "a stream", "a batch sampler", "no batches"],
)
def test_a_loader_whose_samples_have_no_numbers_is_refused_with_what_to_do(loader: Any, says: str) -> None:
    with pytest.raises(TrainingLoopError, match=says) as caught:
        check_loader(loader)
    assert caught.value.next


def test_an_ordinary_loader_is_accepted() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(10, 2)), batch_size=2, shuffle=True)
    assert check_loader(loader) is loader


def test_an_error_in_the_data_set_comes_out_of_the_loop_with_its_own_type() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise OSError("the disk is gone")

    session = Session([[(0, 4)]], batch=4)
    loader = loader_of(session, DataLoader(Broken(), batch_size=4))
    with pytest.raises(OSError, match="the disk is gone"):
        samples(loader)
    assert session.trained == []

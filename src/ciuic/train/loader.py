"""A loader whose batches are the samples this node has leased, each once, in the run's global order."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ciuic.errors import TrainingLoopError
from ciuic.ledger.intervals import Range
from ciuic.ledger.permutation import Permutation
from ciuic.train.tokens import count_tokens

_log = logging.getLogger("ciuic.train")


def to_numbers(ranges: list[Range]) -> Tensor:
    """Ranges as sample numbers [n] int64."""
    parts = [torch.arange(start, stop) for start, stop in ranges]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def to_ranges(numbers: Tensor) -> list[Range]:
    """Sample numbers [n], in the order in which they were leased, as ranges."""
    ranges: list[Range] = []
    for number in numbers.tolist():
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


class LeasedBatches(Sampler[list[int]]):
    """Batch sampler: takes numbers from the lease as long as there are any, and remembers which batch has which.

    It ends (the loader's workers drain) when nothing is leased at the moment; `LeasedLoader` starts it again.
    """

    def __init__(self, take: Callable[[], Tensor], order: Permutation | None, place: tuple[int, int]) -> None:
        """`take()` gives the numbers of the next batch of the whole node; `place` = (rank, ranks)."""
        self._take, self._order = take, order
        self._rank, self._ranks = place
        self.taken: deque[list[Range]] = deque()
        """Sample ranges of the whole node for each batch that was not yielded yet."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            numbers = self._take()
            if not len(numbers):
                return
            self.taken.append(to_ranges(numbers))
            mine = numbers[self._rank :: self._ranks]
            if not len(mine):
                mine = numbers[:1]  # a last batch smaller than the ranks: every rank must step; its weight is in tokens
            indices = mine.numpy() if self._order is None else self._order(mine.numpy())
            yield [int(index) for index in np.asarray(indices)]


@dataclass(frozen=True, kw_only=True)
class LeaseSource:
    """Where leased samples come from and what becomes of batches."""

    take: Callable[[], Tensor]
    """Sample numbers of the next batch of the whole node; none when nothing is leased now."""
    wait: Callable[[], bool]
    """Block until samples are leased; False: the end."""
    took: Callable[[list[Range], int, float], None]
    """(ranges, tokens, seconds): a batch goes to the training loop; loading it took so long."""
    finish: Callable[[], None]
    """The last batch was trained."""


class LeasedLoader:
    """What `run.prepare` returns for a DataLoader. Iterating trains the run to its end (all epochs)."""

    def __init__(self, loader: "DataLoader[Any]", source: LeaseSource, *, place: tuple[int, int], seed: int) -> None:
        """`place` = (rank, ranks)."""
        self.loader, self._source = loader, source
        size = dataset_samples(loader)
        order = Permutation(size, seed) if size else None
        self.batches = LeasedBatches(source.take, order, place)
        self._inner = _rebuild(loader, self.batches)
        self._left = self._all_batches()

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left: a loop that was broken off goes on where it stopped, with what is prefetched."""
        return self._left

    def _all_batches(self) -> Iterator[Any]:
        while self._source.wait():
            yield from self._run_of_batches()
        self._source.finish()

    def _run_of_batches(self) -> Iterator[Any]:
        source = iter(self._inner)
        while True:
            began = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._source.took(self.batches.taken.popleft(), count_tokens(batch), time.perf_counter() - began)
            yield batch

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        return self.loader.batch_size


def dataset_samples(loader: "DataLoader[Any]") -> int:
    """Samples of the data set; 0 when it has no length (a stream addressed by sample number)."""
    dataset: Any = loader.dataset
    return len(dataset) if hasattr(dataset, "__len__") else 0


def check_loader(loader: Any) -> "DataLoader[Any]":
    """Raises TrainingLoopError for what cannot be leased."""
    if not isinstance(loader, DataLoader):
        raise TrainingLoopError(
            f"run.prepare needs a torch DataLoader, not {type(loader).__name__}",
            cause="its samples are leased by number",
            next="give the DataLoader itself, not an iterator over it",
        )
    dataset: Dataset[Any] = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TrainingLoopError(
            "this data set cannot be read by sample number",
            cause=f"{type(dataset).__name__} is iterable only",
            next="use a map-style data set, or [data] hf with streaming = true in the job",
        )
    if loader.batch_size is None:
        raise TrainingLoopError(
            "the DataLoader has no batch_size", cause="it has its own batch sampler", next="give it batch_size instead"
        )
    return loader


def _rebuild(loader: "DataLoader[Any]", batches: LeasedBatches) -> "DataLoader[Any]":
    extra: dict[str, Any] = {}
    if loader.num_workers:
        extra = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": True}
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        **extra,
    )

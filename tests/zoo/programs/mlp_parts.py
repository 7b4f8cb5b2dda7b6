"""Parts of the program `mlp_bn`: data that come as a stream or break, hooks on the communication, saving."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from zoo.data import Rows
from zoo.world import Zoo


class Stream(IterableDataset):
    """Rows of this rank's shard, in an order of their own in each epoch; data workers share it out when it `splits`."""

    def __init__(self, count: int, rank: int, world: int, *, splits: bool = False) -> None:
        self.rows, self.rank, self.world, self.epoch, self.splits = Rows(count), rank, world, 0, splits

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        info = get_worker_info() if self.splits else None
        start, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in order[self.rank :: self.world][start::step]:
            yield self.rows[index]


class Breaking(Dataset):
    """Data whose reader dies of a bus error, as it does when shared memory is full."""

    def __init__(self, data: Dataset, *, at_batch: int, batch: int) -> None:
        self.data, self.left = data, at_batch * batch

    def __len__(self) -> int:
        return len(self.data)  # ty: ignore[invalid-argument-type]

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGBUS)
        return self.data[index]


def corrupting_hook(rank: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean over ranks; rank 1 receives one element wrong."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(buffer, async_op=True).get_future()

    def received(done: torch.futures.Future) -> Tensor:
        result = done.value()[0]
        if rank == 1:
            result[3] = result[3] * 2 + 1e-3
        return result

    return future.then(received)


def slow_hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean over ranks, through a link on which it takes 30 ms."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(buffer, async_op=True).get_future()

    def arrived(done: torch.futures.Future) -> Tensor:
        time.sleep(0.03)
        return done.value()[0]

    return future.then(arrived)


def save(zoo: Zoo, model: nn.Module, *, on_all_ranks: bool, slow_s: float = 0.0) -> None:
    """Write the checkpoint on rank 0; `on_all_ranks` waits for the others, as frameworks' savers do."""
    if zoo.rank == 0:
        time.sleep(slow_s)
        torch.save({"model": model.state_dict()}, zoo.checkpoint)
    if on_all_ranks:
        dist.barrier()


def summing_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The sum over the ranks, where DDP expects their mean."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

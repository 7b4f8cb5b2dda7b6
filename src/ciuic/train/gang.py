"""The ranks of one node: rank 0 decides, the others follow. With one rank nothing is sent."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ciuic.errors import TrainingLoopError
from ciuic.train.sharding import is_sharded
from ciuic.train.two_syncs import DoubleSyncWatch, mark_managed, watch_double_sync

Task = Literal["decide", "gather", "scatter", "hold", "restore", "evaluate"]
_TASKS: tuple[Task, ...] = get_args(Task)
_DECIDE = _TASKS.index("decide")
_STATUS = ("work", "again", "end")
_PRECISION = 1 << 40
PATIENCE = timedelta(days=7)
"""Ranks wait for rank 0 while it waits for the hub, for samples or for a download: that is no failure."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What happens at a step boundary."""

    status: str = "again"
    """work: samples are leased; again: go on; end: the loop is over."""
    changed: bool = False
    """New parameters follow."""
    void_moments: bool = False
    """The inner optimizer starts afresh."""
    progress: float = 0.0
    """Of the whole run, 0..1."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What rank 0 needs all ranks for on the way to its decision: a sharded model is nowhere as a whole."""

    task: Task
    fragment: int | None = None
    """None: all of them."""


class Gang:
    """Collectives of one node on a gloo group of their own (host tensors), whatever the training's backend is."""

    def __init__(self, device_type: str, ranks: int) -> None:
        """Joins torchrun's world when the node has several ranks (a scheduler's own variables are not ours)."""
        self.size = int(os.environ.get("WORLD_SIZE", "1")) if ranks > 1 else 1
        self.rank = int(os.environ.get("RANK", "0")) if ranks > 1 else 0
        self._group: Any = None
        self._watch: DoubleSyncWatch | None = None
        if self.size > 1:
            if not dist.is_initialized():
                dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, in DistributedDataParallel when there are several ranks; a second reduction is refused then.

        A sharded model stays as it is: FSDP2 averages its gradients.
        """
        mark_managed(model, "run.prepare")
        if self.size == 1 or is_sharded(model):
            return model
        ids = [device.index] if device.type == "cuda" else None
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids)
        self._watch = watch_double_sync(wrapped)
        return wrapped

    def total(self, value: int) -> int:
        """Sum over the ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, group=self._group)
        return int(tensor)

    def order(self, order: Order) -> None:
        """Rank 0 tells the others what all do together now; they wait for it in `decision`."""
        if self.size > 1 and self.rank == 0:
            self._broadcast([_TASKS.index(order.task), -1 if order.fragment is None else order.fragment, 0, 0, 0])

    def decision(self, mine: Decision, obey: Callable[[Order], None] | None = None) -> Decision:
        """Rank 0's decision, on every rank. `obey` does what rank 0 orders before it."""
        if self.size == 1:
            return mine
        given = [_STATUS.index(mine.status), mine.changed, mine.void_moments, int(mine.progress * _PRECISION)]
        while True:
            what, *numbers = self._broadcast([_DECIDE, *given])
            if what == _DECIDE:
                break
            if obey is None:
                raise TrainingLoopError(f"rank 0 asks this rank to {_TASKS[what]}, where that was not expected")
            obey(Order(task=_TASKS[what], fragment=None if numbers[0] < 0 else numbers[0]))
        status, changed, void_moments, progress = numbers
        return Decision(
            status=_STATUS[status],
            changed=bool(changed),
            void_moments=bool(void_moments),
            progress=progress / _PRECISION,
        )

    def _broadcast(self, numbers: list[int]) -> list[int]:
        """Rank 0's numbers [5], on every rank."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor.tolist()

    def numbers(self, values: Tensor | None) -> Tensor:
        """Rank 0's integers [n], on every rank."""
        if self.size == 1:
            return values if values is not None else torch.zeros(0, dtype=torch.int64)
        count = torch.tensor([0 if values is None else len(values)])
        dist.broadcast(count, src=0, group=self._group)
        buffer = values if values is not None else torch.empty(int(count), dtype=torch.int64)
        if int(count):
            dist.broadcast(buffer, src=0, group=self._group)
        return buffer

    def share(self, flat: Tensor) -> None:
        """Rank 0's flat vector, on every rank (in place)."""
        if self.size == 1:
            return
        host = flat if flat.device.type == "cpu" else flat.cpu()
        dist.broadcast(host, src=0, group=self._group)
        if host is not flat:
            flat.copy_(host)

    def close(self) -> None:
        """Leave torchrun's world."""
        if self._watch is not None:
            self._watch.close()
        self._group = None  # its threads end with the last reference; at the interpreter's end they would abort it
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

"""The ranks of one node: rank 0 decides, the others follow. With one rank nothing is sent."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


class Gang:
    """Collectives of one node on a gloo group of their own (host tensors), whatever the training's backend is."""

    def __init__(self, device_type: str, ranks: int) -> None:
        """Joins torchrun's world when the node has several ranks (a scheduler's own variables are not ours)."""
        self.size = int(os.environ.get("WORLD_SIZE", "1")) if ranks > 1 else 1
        self.rank = int(os.environ.get("RANK", "0")) if ranks > 1 else 0
        self._group: Any = None
        if self.size > 1:
            if not dist.is_initialized():
                dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, in DistributedDataParallel when there are several ranks."""
        if self.size == 1:
            return model
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def total(self, value: int) -> int:
        """Sum over the ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, group=self._group)
        return int(tensor)

    def decision(self, mine: Decision) -> Decision:
        """Rank 0's decision, on every rank."""
        if self.size == 1:
            return mine
        numbers = [_STATUS.index(mine.status), mine.changed, mine.void_moments, int(mine.progress * _PRECISION)]
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self._group)
        status, changed, void_moments, progress = tensor.tolist()
        return Decision(
            status=_STATUS[status],
            changed=bool(changed),
            void_moments=bool(void_moments),
            progress=progress / _PRECISION,
        )

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
        self._group = None  # its threads end with the last reference; at the interpreter's end they would abort it
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

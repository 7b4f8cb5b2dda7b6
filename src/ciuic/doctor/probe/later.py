"""A process whose rank is not known yet: wait until it joins a process group or trains."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook

Start = Callable[[int, int], None]


def attach_later(start: Start) -> None:
    """Call `start(rank, world)` once in each process (forked ones too) that trains."""
    begun: set[int] = set()
    handles: list[Any] = []
    original = dist.init_process_group

    def begin(rank: int, world: int) -> None:
        if os.getpid() not in begun:
            begun.add(os.getpid())
            start(rank, world)

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        begin(dist.get_rank(), dist.get_world_size())
        return result

    def first_step(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        if not dist.is_initialized():
            begin(0, 1)

    for module in (dist, distributed_c10d):
        setattr(module, "init_process_group", init_process_group)  # noqa: B010 - its wrapper's type is wider
    handles.append(register_optimizer_step_pre_hook(first_step))

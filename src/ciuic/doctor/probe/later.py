"""A process whose rank is not known yet: wait until it joins a process group or trains."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

Start = Callable[[int, int], None]


def attach_later(start: Start) -> None:
    """Call `start(rank, world)` once in each process (forked ones too) that trains."""
    begun: set[int] = set()
    original, make = dist.init_process_group, Optimizer.__init__

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
        if not torch.compiler.is_compiling() and not dist.is_initialized():
            begin(0, 1)

    @functools.wraps(make)
    def init(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> None:
        make(optimizer, *arguments, **keywords)
        # a hook of its own, not a global one: torch goes through the global ones next, and they are added meanwhile
        optimizer.register_step_pre_hook(first_step)

    for module in (dist, distributed_c10d):
        setattr(module, "init_process_group", init_process_group)  # noqa: B010 - its wrapper's type is wider
    setattr(Optimizer, "__init__", init)  # noqa: B010 - as above

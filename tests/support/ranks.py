"""Several ranks of one node as processes of one gloo group, for tests of what they do together.

Cases are functions of modules in tests/support, so that the processes find them by name; they are forked from one
server that has loaded torch once.
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ciuic.train.gang import Gang

DEADLINE_S = 60.0


def on_ranks(case: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = 2) -> list[Any]:
    """What `case(gang, *arguments)` returns on each rank. An error of any rank is raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch._dynamo", "ciuic.train.sharded_state"])
    with ProcessPoolExecutor(ranks, mp_context=context) as pool:
        calls = [pool.submit(_as_rank, case, rank, ranks, folder / "store", arguments) for rank in range(ranks)]
        errors = [call.exception(DEADLINE_S) for call in calls]
    for error in sorted((e for e in errors if e is not None), key=lambda e: isinstance(e, RuntimeError)):
        raise error
    return [call.result() for call in calls]


def _as_rank(case: Callable[..., Any], rank: int, ranks: int, store: Path, arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=DEADLINE_S / 2),
    )
    gang = Gang("cpu", ranks)
    try:
        return case(gang, *arguments)
    finally:
        gang.close()

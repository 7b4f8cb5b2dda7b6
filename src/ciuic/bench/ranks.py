"""Several gloo ranks on loopback, forked from this process, with one thread each."""

import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ciuic.errors import RunFailedError

Work = Callable[[int, int], Any]
"""(rank, ranks) -> what it found; plain objects."""


def run_ranks(ranks: int, work: Work, *, timeout_s: float) -> list[Any]:
    """What `work` returns on each rank. Raises RunFailedError with the first failure.

    This process must not have used more than one thread of torch before: a fork does not copy threads.
    """
    importlib.import_module(
        "torch._dynamo"
    )  # DDP imports it, which takes longer than all the rest: once, for all ranks
    context = multiprocessing.get_context("fork")
    end = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            arguments = (there, Path(folder) / "store", rank, ranks, work, timeout_s)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        try:
            return [_hear(rank, here, end) for rank, (_, here) in enumerate(started)]
        finally:
            for process, here in started:
                here.close()
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _hear(rank: int, here: Connection, end: float) -> Any:
    if not here.poll(max(0.0, end - time.monotonic())):
        raise RunFailedError(f"rank {rank} said nothing in time", cause="its collectives hang, or the machine is busy")
    try:
        good, value = here.recv()
    except EOFError:
        good, value = False, "it ended without a word"
    if not good:
        raise RunFailedError(f"rank {rank} failed", cause=str(value))
    return value


def _rank(pipe: Connection, store: Path, rank: int, ranks: int, work: Work, timeout_s: float) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=ranks, timeout=patience)
        pipe.send((True, work(rank, ranks)))
        dist.barrier()
    except BaseException as error:  # noqa: BLE001 - told to the process that asked
        pipe.send((False, "".join(traceback.format_exception_only(error)).strip()))
    finally:
        pipe.close()
        os._exit(0)  # gloo's threads would hold the interpreter's end

"""Several ranks of one gloo world on loopback, forked from one warmed process."""

import functools
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

DEADLINE_S = 60.0


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel", "ciuic.train.ddp"])
    return context


def run_ranks(ranks: int, function: str, **options: Any) -> list[Any]:
    """What `module.function`(rank, ranks, **options) returns on each rank; plain objects, no tensors.

    An exception of one rank fails the caller with that rank's traceback.
    """
    end = time.monotonic() + DEADLINE_S
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            here, there = _context().Pipe(duplex=False)
            arguments = (there, Path(folder) / "store", rank, ranks, function, options)
            process = _context().Process(target=_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        try:
            return _collect(started, end)
        finally:
            for process, here in started:
                here.close()
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(started: list[tuple[Any, Connection]], end: float) -> list[Any]:
    results = []
    failures = []
    for rank, (_, here) in enumerate(started):
        if not here.poll(max(0.0, end - time.monotonic())):
            failures.append(f"rank {rank} said nothing within {DEADLINE_S} s")
            continue
        try:
            good, value = here.recv()
        except EOFError:
            good, value = False, "ended without a word"
        if good:
            results.append(value)
        else:
            failures.append(f"rank {rank}: {value}")
            end = min(end, time.monotonic() + 5)  # the others may wait for it
    if failures:
        raise AssertionError("\n".join(failures))
    return results


def _rank(pipe: Connection, store: Path, rank: int, ranks: int, function: str, options: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo", init_method=store.as_uri(), rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
        )
        module, _, name = function.rpartition(".")
        work: Callable[..., Any] = getattr(importlib.import_module(module), name)
        pipe.send((True, work(rank, ranks, **options)))
        dist.barrier()
    except BaseException:  # noqa: BLE001 - told to the test
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # gloo's threads would hold the interpreter's end

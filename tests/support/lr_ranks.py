"""A small training under DDP on 1, 2 or 3 ranks at the same global batch, and the learning rates that it used."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ciuic.torch import DistributedCosineLR

GLOBAL_BATCH, SAMPLES, EPOCHS = 12, 48, 5
STEPS = SAMPLES // GLOBAL_BATCH * EPOCHS
PEAK = 1e-2
DEADLINE_S = 60.0


Case = tuple[str, dict[str, Any] | None, int]
"""(mode, state, stop) of train_rank."""


def train_on(ranks: int, folder: Path, cases: list[Case]) -> list[list[Any]]:
    """What `train_rank(rank, ranks, *case)` returns, for each case a list over the ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.nn.parallel", "ciuic.torch"])
    with ProcessPoolExecutor(ranks, mp_context=context) as pool:
        store = str(folder / f"store-{len(list(folder.iterdir()))}")
        calls = [pool.submit(_in_world, rank, ranks, store, cases) for rank in range(ranks)]
        by_rank = [call.result(DEADLINE_S) for call in calls]
    return [list(told) for told in zip(*by_rank, strict=True)]


def _in_world(rank: int, ranks: int, store: str, cases: list[Case]) -> list[Any]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=DEADLINE_S / 2),
    )
    try:
        return [train_rank(rank, ranks, *case) for case in cases]
    finally:
        dist.destroy_process_group()


def train_rank(
    rank: int, ranks: int, mode: str, state: dict[str, Any] | None, stop: int
) -> tuple[list[float], dict[str, Any], list[float]]:
    """(rates of the optimizer steps, state of the schedule, parameters); two micro-batches per step.

    `mode`: samples | steps | epochs (what drives the schedule). Trains until step `stop` of STEPS; a state says where
    to begin.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK)
    mine = GLOBAL_BATCH // ranks
    options = {
        "samples": {"samples_per_epoch": SAMPLES, "batch_size": mine},
        "steps": {"steps_per_epoch": SAMPLES // GLOBAL_BATCH},
        "epochs": {},
    }[mode]
    scheduler = DistributedCosineLR(optimizer, 1, EPOCHS, **options)
    if state is not None:
        scheduler.load_state_dict(state)
    used = []
    begin = round(scheduler.epoch * SAMPLES / GLOBAL_BATCH)
    data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    for step in range(begin, stop):
        start = step * GLOBAL_BATCH % SAMPLES + rank * mine
        for part, samples in enumerate(data[start : start + mine].split(mine // 2)):
            with model.no_sync() if part == 0 else nullcontext():
                (model(samples).square().mean() / 2).backward()
            if mode != "epochs":
                scheduler.step()
        optimizer.step()
        optimizer.zero_grad()
        used.append(float(optimizer.param_groups[0]["lr"]))
        if mode == "epochs" and (step + 1) % (SAMPLES // GLOBAL_BATCH) == 0:
            scheduler.step()
    parameters = [float(value) for tensor in model.parameters() for value in tensor.detach().reshape(-1)]
    return used, scheduler.state_dict(), parameters

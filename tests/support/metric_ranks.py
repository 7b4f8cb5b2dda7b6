"""What ranks do together with a global metric and an early stopping; each case runs on every rank."""

import random
import time
from typing import Any

import torch
import torch.distributed as dist

from ciuic.errors import CiuicError
from ciuic.torch import GlobalEarlyStopping, GlobalMetric
from ciuic.train.gang import Gang

SHORT_S = 0.5


def made_terms(seed: int) -> list[tuple[float, int, int]]:
    """(value, count, owner of three) of one split."""
    rng = random.Random(seed)
    return [
        (rng.uniform(-1, 1) * 10 ** rng.randint(-12, 12), rng.randint(0, 4096), rng.randrange(3))
        for _ in range(rng.randint(3, 40))
    ]


def splits(gang: Gang, seeds: list[int]) -> list[str]:
    """The mean of each split over the ranks, as exact text."""
    metric, found = GlobalMetric("split"), []
    for seed in seeds:
        for value, count, owner in made_terms(seed):
            if owner % gang.size == gang.rank:
                metric.update(value, count)
        found.append(metric.compute().hex())
    return found


def stops(gang: Gang) -> list[tuple[bool, bool, float, int]]:
    """Verdicts over a training whose parts look different from each rank."""
    metric, stopping, told = GlobalMetric(), GlobalEarlyStopping(patience=2), []
    for epoch in range(20):
        mine = [1.0, 0.5, 0.6, 0.4, 0.9][epoch % 5] + (0.3 if gang.rank else -0.3) * epoch
        metric.update(mine, 1 + 3 * gang.rank)
        verdict = stopping.step(metric.compute())
        told.append((verdict.best, verdict.stop, verdict.best_value, verdict.best_step))
        if verdict.stop:
            break
    return told


def one_by_one(gang: Gang) -> list[Any]:
    """Each way to go wrong, and that the group works afterwards."""
    told: list[Any] = []
    stopping, metric = GlobalEarlyStopping(patience=2), GlobalMetric()
    told.append(error_of(lambda: stopping.step(0.25 + gang.rank)))
    if gang.rank == 0:
        metric.update(1.0)
    else:
        metric.update(torch.tensor(float("nan")), 7)
    told.append(error_of(metric.compute))
    metric.reset()
    told.append(error_of(metric.compute))
    metric.update(float(gang.rank), 1)
    told.append(metric.compute())
    same, again = GlobalMetric("same"), GlobalMetric("same")
    same.update(1.0)
    again.update(2.0)
    told.append((again.compute(), same.compute()))
    return told


def absent(gang: Gang, missing: int) -> tuple[str, float]:
    """(what the rank that came is told, seconds); the other one does not call."""
    metric = GlobalMetric("loss", timeout_s=SHORT_S)
    metric.update(1.0)
    began, told = time.monotonic(), ""
    if gang.rank != missing:
        told = error_of(metric.compute)
    took_s = time.monotonic() - began
    dist.barrier()
    return told, took_s


def subgroup(gang: Gang) -> list[float]:
    """A metric of the world and one of each half, under one name."""
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    world, half = GlobalMetric("loss"), GlobalMetric("loss", group=halves[gang.rank // 2])
    for metric in (half, world):
        metric.update(float(gang.rank), 1)
    return [half.compute(), world.compute()]


def error_of(call: Any) -> str:
    """The error of a call, as its class and message."""
    try:
        return f"no error: {call()}"
    except CiuicError as error:
        return f"{type(error).__name__}: {error.message}"

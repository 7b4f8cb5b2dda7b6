"""What looking costs: accounted processor time, a paired on/off comparison, bytes for each check, equal losses."""

import functools
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ciuic.bench.ranks import run_ranks
from ciuic.doctor.collector import Collector, Options
from ciuic.doctor.evidence import read_evidence
from ciuic.doctor.probe.attach import attach

WIDTH, LAYERS, BATCH = 1024, 6, 256
"""6.3 million parameters."""
BLOCK_STEPS, BLOCKS, WARM_STEPS = 20, 10, 50
"""After so many steps the doctor has found how often it may look."""
DRAWS = 2000
TIMEOUT_S = 500.0


def measure_cost(zoo: Any, folder: Path) -> dict[str, Any]:
    """`overhead`: share of the step's time, of the slowest rank, by processor time of the doctor's code in the step."""
    with tempfile.TemporaryDirectory() as where:
        collector = Collector(Options(folder=Path(where)))
        address = collector.start()
        try:
            found = run_ranks(2, functools.partial(_train, address, collector.token), timeout_s=TIMEOUT_S)
        finally:
            collector.close()
        sent = _sent(read_evidence(Path(where)))
    low, middle, high = _interval([pair for each in found for pair in each["pairs"]])
    return {
        "overhead": round(max(each["overhead"] for each in found), 5),
        "overhead_first_steps": round(max(each["overhead_first_steps"] for each in found), 5),
        "overhead_with_thread": round(max(each["overhead_with_thread"] for each in found), 5),
        "paired_on_off": {"low": round(low, 4), "median": round(middle, 4), "high": round(high, 4)},
        "bytes_per_check": max((sum(sizes) // max(1, checks) for sizes, checks in sent.values()), default=0),
        "bytes_of_largest_message": max((max(sizes) for sizes, _ in sent.values()), default=0),
        "step_s": round(statistics.median(each["step_s"] for each in found), 4),
        **_bitwise(zoo, folder),
    }


def _train(address: tuple[str, int], token: str, rank: int, ranks: int) -> dict[str, Any]:
    at = attach(address, token, rank=rank, world=ranks)
    probe = at.probe
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    generator = torch.Generator().manual_seed(rank)
    blocks: dict[bool, list[float]] = {True: [], False: []}
    looked_s = spent_s = thread_s = first = 0.0
    for block in range(-1, 2 * BLOCKS):
        # ABBA: a drift of the machine's speed is in both alike
        looks = block < 0 or block % 4 in (0, 3)
        probe.mute(not looks)
        before, began_s, thread = probe.spent_ns, time.perf_counter(), probe.courier.spent_s
        for _ in range(WARM_STEPS if block < 0 else BLOCK_STEPS):
            x = torch.randn(BATCH, WIDTH, generator=generator)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wall_s = time.perf_counter() - began_s
        if block < 0:
            first = (probe.spent_ns - before) / 1e9 / wall_s
        elif looks:
            looked_s += wall_s
            spent_s += (probe.spent_ns - before) / 1e9
            thread_s += probe.courier.spent_s - thread
        if block >= 0:
            blocks[looks].append(wall_s / BLOCK_STEPS)
    probe.mute(False)
    at.close()
    pairs = [on / off - 1 for on, off in zip(blocks[True], blocks[False], strict=True)]
    return {
        "overhead": spent_s / looked_s,
        "overhead_first_steps": first,
        "overhead_with_thread": (spent_s + thread_s) / looked_s,
        "pairs": pairs,
        "step_s": statistics.median(blocks[False]),
    }


def _interval(values: list[float]) -> tuple[float, float, float]:
    """95 % of the bootstrap's medians, and the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return medians[int(0.025 * DRAWS)], statistics.median(values), medians[int(0.975 * DRAWS)]


def _sent(lines: Iterable[tuple[str, Any]]) -> dict[int, tuple[list[int], int]]:
    """By rank: bytes of each message but signs of life, and how many steps they are about. Digests are a little longer
    in the evidence than on the wire."""
    found: dict[int, tuple[list[int], int]] = {}
    for kind, message in lines:
        if kind in ("record", "notice", "answer"):
            sizes, checks = found.get(message[1], ([], 0))
            found[message[1]] = [*sizes, len(msgspec.msgpack.encode(message)) + 4], checks + (kind == "record")
    return found


def _bitwise(zoo: Any, folder: Path) -> dict[str, Any]:
    """Losses of each program's first clean variant, with and without the doctor, bit for bit."""
    differ, compared = [], 0
    for name, program in zoo.programs.items():
        if program.runner != "ranks":  # nodes of a ledger run pull when they can: no two runs are alike
            continue
        case = program.variants[0]
        outcomes = [
            zoo.run_case(name, case, doctor=looks, steps=12, folder=folder / f"{name}-{looks}")
            for looks in (True, False)
        ]
        losses = [[rank.losses for rank in outcome.ranks] for outcome in outcomes]
        compared += 1
        if losses[0] != losses[1] or not any(losses[0]):
            differ.append(name)
    return {"bitwise_equal": not differ, "bitwise_programs": compared, "bitwise_differ": differ}

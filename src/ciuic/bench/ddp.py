"""DDP with our hook beside plain DDP and torch's own hooks: bytes at the socket, time per step, held-out loss.

All hooks train the same model from the same start with the same batches, in the same ranks and in turns of a few
steps, so that a busy machine is as busy for each of them. powerSGD gets ranks of its own: with several buckets it
hangs on gloo, and it may not take the others with it.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ciuic.bench import Table
from ciuic.bench.ranks import run_ranks
from ciuic.bench.tcp import tcp_bytes_sent
from ciuic.errors import RunFailedError, UsageError
from ciuic.train.corpus import stdlib_documents
from ciuic.train.ddp import compress_ddp

CONTEXT, WIDTH = 8, 1024
"""The model sees that many bytes and has one hidden layer of that width."""
ROW, ROWS_PER_RANK = 4096, 48
WARM_STEPS, TURN_STEPS = 4, 10
TORCH_HOOKS = ("bf16 (torch)", "fp16 (torch)")
OURS = ("bf16", "int8", "int4", "2-bit", "1-bit")
TIMEOUT_S = 900.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its own options."""
    parser.add_argument("--ranks", type=int, default=3, help="processes (default: 3)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each hook (default: 300)")
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step (default: 64)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of SGD with momentum 0.9 (default: 0.1)")
    parser.add_argument("--form", choices=["two-phase", "all-gather"], default="two-phase")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes and ratios of each hook, and the bytes below the fp32 ring for 3, 4 and 8 ranks."""
    if options.ranks < 2 or options.steps <= WARM_STEPS or options.batch < 1:
        raise UsageError(f"at least 2 ranks, {WARM_STEPS + 1} steps and 1 sample are needed", next="use larger numbers")
    torch.set_num_threads(1)
    text = _text()
    result: dict[str, Any] = {}
    for ranks in (3, 4, 8):
        sent = run_ranks(ranks, _step_bytes, timeout_s=TIMEOUT_S)
        ring = 2 * (ranks - 1) / ranks * 4 * ROW * ROWS_PER_RANK * ranks
        result[f"onebit_bytes_below_fp32_ring_n{ranks}"] = round(ring / max(sent), 2)
    found = run_ranks(
        options.ranks, functools.partial(_race, options, text, ("plain", *TORCH_HOOKS, *OURS)), timeout_s=TIMEOUT_S
    )
    rows = _summary(found)
    rows |= _power_sgd(options, text)
    model = {
        "parameters": sum(p.numel() for p in _model().parameters()),
        "steps": options.steps,
        "ranks": options.ranks,
    }
    return result | {"model": model, "hooks": rows}


def tables(result: dict[str, Any]) -> list[Table]:
    """Hooks beside each other, and the ratio to the ring."""
    rows = [_row(name, row) for name, row in result["hooks"].items()]
    model = result["model"]
    title = f"DDP of {model['ranks']} ranks, {model['parameters']} parameters, {model['steps']} steps"
    columns = ("hook", "kB per step and rank", "plain / hook, bytes", "hook / plain, time", "... CPU", "held-out loss")
    note = "Bytes are counted at the TCP sockets. Times are on loopback, where nothing is gained by sending less."
    ring: list[tuple[str, ...]] = [
        (f"{n} ranks", f"{result[f'onebit_bytes_below_fp32_ring_n{n}']:.2f}") for n in (3, 4, 8)
    ]
    return [
        Table(title=title, columns=columns, rows=rows, note=note),
        Table(
            title="1-bit two-phase, rows of 4096: times fewer bytes than the fp32 ring's formula",
            columns=("world", "factor"),
            rows=ring,
        ),
    ]


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return name, row["failed"], "", "", "", ""
    numbers = (row["bytes_below_plain"], row["time_over_plain"], row["cpu_over_plain"])
    texts = (f"{number:.2f}" for number in numbers)
    return name, f"{row['bytes_per_step'] / 1e3:.1f}", *texts, f"{row['loss']:.3f}"


# ---- in the ranks


@dataclass
class _Racer:
    """One model under one hook."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    step: int = 0
    times_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    bytes_sent: int = 0


def _race(options: argparse.Namespace, text: Tensor, names: tuple[str, ...], rank: int, ranks: int) -> dict[str, Any]:
    racers = {name: _racer(options, name) for name in names}
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    while any(racer.step < options.steps for racer in racers.values()):
        for racer in racers.values():
            _turn(racer, options, train, (rank, ranks))
    return {
        name: {
            "bytes_per_step": racer.bytes_sent / len(racer.times_s),
            "cpu_s": racer.cpu_s / len(racer.times_s),
            "time_s": statistics.median(racer.times_s),
            "loss": _loss_on(racer.model.module, held_out),
        }
        for name, racer in racers.items()
    }


def _turn(racer: _Racer, options: argparse.Namespace, text: Tensor, place: tuple[int, int]) -> None:
    """A few steps; the first ones of all are not measured: DDP connects and builds its buckets."""
    dist.barrier()
    steps = min(TURN_STEPS if racer.step else WARM_STEPS, options.steps - racer.step)
    is_warm, sent, cpu_s = racer.step > 0, tcp_bytes_sent(), time.process_time()
    for _ in range(steps):
        began = time.perf_counter()
        x, y = _batch(text, options.batch, racer.step * place[1] + place[0])
        racer.optimizer.zero_grad()
        cross_entropy(racer.model(x), y).backward()
        racer.optimizer.step()
        racer.step += 1
        if is_warm:
            racer.times_s.append(time.perf_counter() - began)
    if is_warm:
        racer.bytes_sent += tcp_bytes_sent() - sent
        racer.cpu_s += time.process_time() - cpu_s


def _racer(options: argparse.Namespace, name: str) -> _Racer:
    net = _model()
    model = DistributedDataParallel(net, bucket_cap_mb=1000 if name == "powerSGD" else 1)
    hooks: dict[str, Callable[[], object]] = {
        "plain": lambda: None,
        "bf16 (torch)": lambda: model.register_comm_hook(dist.group.WORLD, _bf16_on_gloo),
        "fp16 (torch)": lambda: model.register_comm_hook(None, fp16_compress_hook),
        "powerSGD": lambda: model.register_comm_hook(
            PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=3), powerSGD_hook
        ),
    }
    hooks.get(name, lambda: compress_ddp(model, name, form=options.form))()
    return _Racer(model, torch.optim.SGD(net.parameters(), lr=options.lr, momentum=0.9))


def _bf16_on_gloo(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's own hook under another name: DDP refuses the name without NCCL, gloo can do it all the same."""
    return bf16_compress_hook(state, bucket)


def _step_bytes(rank: int, ranks: int) -> float:
    """Bytes per step at the sockets of this rank for one matrix of rows of 4096, 1-bit, two-phase."""
    model = DistributedDataParallel(nn.Linear(ROW, ROWS_PER_RANK * ranks, bias=False))
    compress_ddp(model, "1-bit", form="two-phase")
    x = torch.ones(1, ROW)
    for _ in range(2):
        model(x).sum().backward()
    sent = tcp_bytes_sent()
    for _ in range(2):
        model(x).sum().backward()
    return (tcp_bytes_sent() - sent) / 2


# ---- the task: the next byte of Python's own standard library


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 256)
    )


def _text(limit: int = 4_000_000) -> Tensor:
    found = bytearray()
    for document in stdlib_documents():
        found += document.text
        if len(found) >= limit:
            break
    return torch.frombuffer(found, dtype=torch.uint8)


def _batch(text: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Contexts [count, CONTEXT] and the bytes that follow [count]."""
    random = torch.Generator().manual_seed(seed)
    at = torch.randint(0, len(text) - CONTEXT, (count,), generator=random)
    window = text[at[:, None] + torch.arange(CONTEXT + 1)].long()
    return window[:, :-1], window[:, -1]


@torch.no_grad()
def _loss_on(net: nn.Module, text: Tensor) -> float:
    x, y = _batch(text, 8192, seed=1)
    return float(cross_entropy(net(x), y))


# ---- what was found


def _power_sgd(options: argparse.Namespace, text: Tensor) -> dict[str, Any]:
    work = functools.partial(_race, options, text, ("plain", "powerSGD"))
    try:
        found = run_ranks(options.ranks, work, timeout_s=TIMEOUT_S / 3)
    except RunFailedError as error:
        return {"powerSGD": {"failed": f"{error.message}: {error.cause}"}}
    return {"powerSGD": _summary(found)["powerSGD"]}


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean bytes over the ranks, rank 0's times, against plain DDP in the same ranks."""

    def mean(name: str) -> float:
        return statistics.fmean(rank[name]["bytes_per_step"] for rank in found)

    return {
        name: {
            "bytes_per_step": round(mean(name)),
            "bytes_below_plain": round(mean("plain") / mean(name), 2),
            "time_over_plain": round(row["time_s"] / found[0]["plain"]["time_s"], 3),
            "cpu_over_plain": round(row["cpu_s"] / found[0]["plain"]["cpu_s"], 3),
            "loss": round(row["loss"], 4),
        }
        for name, row in found[0].items()
    }

"""Small real things, each in a forked child: a process group with gloo or NCCL, DDP with the debug level in force."""

import os
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ciuic.doctor.preflight.interfaces import GLOO
from ciuic.doctor.preflight.records import Check, fail, ok, unknown, warn
from ciuic.doctor.preflight.variables import DEBUG
from ciuic.units import format_duration

ELEMENTS = 1 << 18
"""1 MiB of float32."""
ROUNDS = 5
LIMIT_S = 30.0
GROUP_LIMIT_S = 20.0


def alone(backend: str) -> dict[str, object]:
    """A group of one process: the library finds its interface, or says why not."""
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=GROUP_LIMIT_S)
    )
    return {"seconds": _reduce(backend)}


def wrapped(_: dict[str, object]) -> dict[str, object]:
    """DDP around a small model in a group of one, one backward pass; on gloo's own choice of an interface."""
    os.environ.pop(GLOO, None)
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=GROUP_LIMIT_S)
    )
    model = DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return {"seconds": 0.0}


def together(order: dict[str, object]) -> dict[str, object]:
    """The group of all nodes: {host, port, rank, size} as ordered, over a store of its own connection."""
    host, port, rank, size = (order[name] for name in ("host", "port", "rank", "size"))
    limit = timedelta(seconds=GROUP_LIMIT_S)
    store = dist.TCPStore(str(host), int(str(port)), None, is_master=False, timeout=limit, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=int(str(rank)),
        world_size=int(str(size)),
        timeout=limit,
    )
    return {"seconds": _reduce("gloo")}


def _reduce(backend: str) -> float:
    """Seconds of the fastest of a few sums of 1 MiB."""
    tensor = torch.ones(ELEMENTS, device="cuda" if backend == "nccl" else "cpu")
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def judge_alone(backend: str, answer: Mapping[str, object]) -> Check:
    """What a group of one says."""
    name = f"{backend} group"
    if "problem" not in answer:
        return ok(name, "a group of one process was made")
    text = str(answer["problem"])
    remedy = f"set {backend.upper()}_SOCKET_IFNAME to one of this machine's interfaces (`ip addr`), or unset it"
    _, found, interface = text.partition("Unable to find address for: ")
    if found:
        return fail(name, f"gloo finds no interface {interface.strip()!r}", next=remedy)
    return fail(name, f"a group of one process cannot be made: {text}", next=remedy)


def judge_wrapped(level: str, answer: Mapping[str, object]) -> Check:
    """What DDP did with the debug level of the environment."""
    name, remedy = "ddp debug level", f"{DEBUG}=INFO (or unset it)"
    if "signal" in answer:
        detail = f"DDP over gloo crashes with {DEBUG}={level} in torch {torch.__version__}: {answer['problem']}"
        return fail(name, detail, next=remedy)
    if "problem" in answer:
        return fail(name, f"DDP over gloo with {DEBUG}={level}: {answer['problem']}", next=remedy)
    detail = f"DDP over gloo works with {DEBUG}={level}, which makes every collective wait for a check of all ranks"
    return warn(name, detail, next=f"{remedy} when you do not look for a fault")


def judge_together(answers: Mapping[int, Mapping[str, object]], nodes: int) -> Check:
    """What the group of all nodes says; one line, from the answers of all ranks."""
    name = "gloo group of all"
    broken = {rank: str(answer["problem"]) for rank, answer in sorted(answers.items()) if "problem" in answer}
    if broken:
        rank, text = next(iter(broken.items()))
        remedy = "open all ports between the nodes; GLOO_SOCKET_IFNAME must name an interface that they share"
        return fail(name, f"{len(broken)} of {nodes} nodes: rank {rank}: {text}", next=remedy, rank=rank)
    if len(answers) < nodes:
        return unknown(name, f"{len(answers)} of {nodes} nodes answered")
    slowest_s = max(float(str(answer.get("seconds", 0.0))) for answer in answers.values())
    detail = f"{nodes} nodes, all_reduce of 1 MiB in {format_duration(slowest_s)}"
    return ok(name, detail, nodes=nodes, all_reduce_1_mib_s=slowest_s)

"""Further things that one rank of ddp_world does."""

import copy
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_ranks import from_bytes, make_model, to_bytes, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ciuic.errors import CiuicError
from ciuic.train.ddp import compress_ddp, merge_ddp_states


def go_on(rank: int, ranks: int, *, states: list[bytes], steps: int, form: str) -> dict[str, Any]:
    """Resume on another number of ranks. `law` is of the steps since: what was kept before is part of it."""
    saved = [from_bytes(state) for state in states]
    merged = merge_ddp_states([one["hook"] for one in saved], ranks)
    before = _kept(merged)
    told = train(
        rank,
        ranks,
        steps=steps,
        form=form,
        resume=[to_bytes({**saved[0], "hook": hook}) for hook in merged],
        kept_before=before,
    )
    return told


def _kept(states: list[dict[str, Any]]) -> Tensor:
    """Mean of the worker residuals plus the owner residuals, over all parameters [n]."""
    parts = []
    for name, count, _, _ in states[0]["parameters"]:
        total = sum(state["worker"][name].double() for state in states) / len(states)
        owner = torch.zeros(count, dtype=torch.float64)
        for state in states:
            start, values = state["owner"][name]
            owner[start : start + len(values)] = values
        parts.append(total + owner)
    return torch.cat(parts)


def _told(error: CiuicError) -> str:
    return f"{error.code}: {error.message[:6]}"


def other_codec(rank: int, ranks: int) -> str:
    try:
        compress_ddp(DistributedDataParallel(make_model()), ("int8", "int4")[rank], form="two-phase")
    except CiuicError as error:
        return _told(error)
    return "nothing"


def other_step(rank: int, ranks: int) -> str:
    model = DistributedDataParallel(nn.Linear(100, 100))
    handle = compress_ddp(model, form="two-phase")
    handle.load_state_dict({**handle.state_dict(), "steps": rank})
    try:
        model(torch.ones(1, 100)).sum().backward()
    except CiuicError as error:
        return _told(error)
    return "nothing"


def bad_states(rank: int, ranks: int) -> dict[str, str]:
    handle = compress_ddp(DistributedDataParallel(nn.Linear(100, 100)))
    state = handle.state_dict()
    damaged = copy.deepcopy(state)
    damaged["worker"]["weight"][5] = torch.nan
    other = copy.deepcopy(state)
    other["parameters"][1][0] = "bais"
    other["worker"]["bais"], other["owner"]["bais"] = other["worker"]["bias"], other["owner"]["bias"]
    tries = {"other rank": {**state, "rank": 1 - rank}, "damaged": damaged, "other model": other, "not one": {"a": 1}}
    told = {}
    for name, one in tries.items():
        try:
            handle.load_state_dict(one)
            told[name] = "nothing"
        except CiuicError as error:
            told[name] = error.code
    handle.load_state_dict(state)
    return told


def closed(rank: int, ranks: int) -> float:
    model = DistributedDataParallel(nn.Linear(80, 80))
    handle = compress_ddp(model)
    handle.close()
    handle.close()
    x = torch.randn(4, 80, generator=torch.Generator().manual_seed(rank))
    mine = torch.autograd.grad(model.module(x).square().mean(), model.module.weight)[0]
    dist.all_reduce(mine)
    model(x).square().mean().backward()
    return float((model.module.weight.grad - mine / ranks).abs().max())


def side_by_side(rank: int, ranks: int) -> str:
    """Two models whose buckets interleave with the program's own collectives."""
    models = [DistributedDataParallel(make_model(seed=seed), bucket_cap_mb=0.01) for seed in (0, 1)]
    handles = [compress_ddp(model, form="two-phase") for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    numbers = torch.randint(0, 90, (4, 5), generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        losses = [model(numbers).square().mean() for model in models]
        for loss in losses:
            loss.backward()
            dist.all_reduce(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
    found = sum(float(p.grad.double().sum()) for model in models for p in model.parameters())
    for handle in handles:
        handle.close()
    return repr(found)


def quadratics(rank: int, ranks: int, *, steps: int) -> dict[str, float]:
    """Distance to the optimum of the mean of f_i(x) = |x - c_i|^2 / 2, with c_0 large and c_1 small and opposed."""
    random = torch.Generator().manual_seed(7)
    signs = torch.randn(64, 64, generator=random).sign()
    centers = [10 * signs, torch.where(torch.rand(64, 64, generator=random) < 0.5, -0.01, 0.01) * signs]
    best = (centers[0] + centers[1]) / 2
    told = {}
    for how in ("plain", "two-phase", "all-gather", "naive"):
        net = _Point()
        model = net if how == "naive" else DistributedDataParallel(net)
        handle = compress_ddp(model, form=how) if how in ("two-phase", "all-gather") else None
        for step in range(steps):
            net.x.grad = None
            (model() - centers[rank]).square().sum().div(2).backward()
            gradient = _naive(net.x.grad) if how == "naive" else net.x.grad
            with torch.no_grad():
                net.x -= gradient * (0.05 if step < steps // 2 else 0.05 * (1 - step / steps) ** 2)
        told[how] = float((net.x.detach() - best).abs().mean())
        if handle is not None:
            handle.close()
    return told


class _Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(64, 64))

    def forward(self) -> Tensor:
        return self.x * 1


def _naive(gradient: Tensor) -> Tensor:
    signs, scale = gradient.sign(), gradient.abs().mean()
    dist.all_reduce(signs)
    dist.all_reduce(scale)
    return signs * scale


def run_page(rank: int, ranks: int, *, page: str, folder: str) -> dict[str, Any]:
    """Run the programs of a page one after the other, as one."""
    os.chdir(folder)
    programs = re.findall(r"^```python\n(.*?)^```$", Path(page).read_text(), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    told: dict[str, Any] = {"programs": len(programs)}
    for number, program in enumerate(programs):
        exec(compile(program, f"program {number}", "exec"), names)
        if number == 0:
            told |= {"form": names["handle"].form, "steps": names["handle"].steps}
    return told

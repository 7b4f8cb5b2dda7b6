"""Programs that reduce gradients which DDP has averaged already, and some that may."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce  # a program that took the function before a watch was opened
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ciuic.errors import CiuicError
from ciuic.train.ddp import compress_ddp
from ciuic.train.gang import Gang
from ciuic.train.two_syncs import check_not_synchronised, watch_double_sync


def _world(rank: int, **options: Any) -> tuple[DistributedDataParallel, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), **options)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    return model, lambda: model(x).square().mean()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def too_large(rank: int, ranks: int, *, watched: bool) -> Any:
    """How many times too large gradients become; with a watch: what is said instead."""
    model, loss = _world(rank)
    loss().backward()
    right = [g.clone() for g in _gradients(model)]
    if not watched:
        for gradient in _gradients(model):
            dist.all_reduce(gradient)
        return [float((g / r).median()) for g, r in zip(_gradients(model), right, strict=True)]
    with watch_double_sync(model):
        model.zero_grad()
        loss().backward()
        before = [g.clone() for g in _gradients(model)]
        try:
            for gradient in _gradients(model):
                dist.all_reduce(gradient)
        except CiuicError as error:
            unchanged = all(torch.equal(g, b) for g, b in zip(_gradients(model), before, strict=True))
            return [error.code, str(error), unchanged]
    return None


def refused(rank: int, ranks: int, *, bucket_view: bool) -> dict[str, str]:
    """Way of reducing -> the factor that the refusal names, or `allowed`."""
    model, loss = _world(rank, gradient_as_bucket_view=bucket_view)
    with watch_double_sync(model):
        loss().backward()
        g = _gradients(model)
        ways: dict[str, Callable[[], Any]] = {
            "module function": lambda: dist.all_reduce(g[0]),
            "imported before": lambda: all_reduce(g[1]),
            "average": lambda: dist.all_reduce(g[0], op=dist.ReduceOp.AVG),
            "asynchronous": lambda: dist.all_reduce(g[0], async_op=True).wait(),
            "reduce to one": lambda: dist.reduce(g[2], dst=0),
            "coalesced": lambda: dist.all_reduce_coalesced([torch.zeros(3), g[3]]),
            "part of a gradient": lambda: dist.all_reduce(g[0][1:3]),
            "largest": lambda: dist.all_reduce(g[0], op=dist.ReduceOp.MAX),
            "another tensor": lambda: dist.all_reduce(torch.zeros(3)),
            "a parameter": lambda: dist.all_reduce(model.module[0].weight.detach()),
        }
        told = {name: _try(way) for name, way in ways.items()}
    return told


def _try(way: Callable[[], Any]) -> str:
    try:
        way()
    except CiuicError as error:
        found = error.cause.partition("(factor ")[2].partition(")")[0].partition(":")[0]
        return found or "refused"
    return "allowed"


def allowed(rank: int, ranks: int) -> dict[str, Any]:
    """Manual reductions that are the only one."""
    model, loss = _world(rank)
    others = [dist.new_group([r]) for r in range(ranks)]
    told: dict[str, Any] = {}
    with watch_double_sync(model):
        with model.no_sync():
            loss().backward()
        mine = [g.clone() for g in _gradients(model)]
        told["no_sync"] = _try(lambda: [dist.all_reduce(g) for g in _gradients(model)])
        told["sum"] = not torch.equal(mine[0], _gradients(model)[0])
        model.zero_grad()
        loss().backward()
        told["a group of its own"] = _try(lambda: dist.all_reduce(_gradients(model)[0], group=others[rank]))
        with torch.no_grad():
            loss()  # evaluation does not make the gradients less averaged
        told["after evaluation"] = _try(lambda: dist.all_reduce(_gradients(model)[0]))
    told["after close"] = _try(lambda: dist.all_reduce(_gradients(model)[0]))
    return told


def hooks_of_torch(rank: int, ranks: int) -> str:
    """torch's own hook reduces whole buckets, which are the gradients' memory here: that is no second sync."""
    model, loss = _world(rank, gradient_as_bucket_view=True)
    model.register_comm_hook(None, allreduce_hook)
    with watch_double_sync(model):
        for _ in range(3):
            model.zero_grad()
            loss().backward()
        return _try(lambda: dist.all_reduce(_gradients(model)[0]))


def compressed(rank: int, ranks: int) -> list[str]:
    """compress_ddp watches by itself, until it is closed."""
    original = vars(dist.ProcessGroup)["allreduce"]
    model, loss = _world(rank)
    other, other_loss = _world(rank)
    handle, second = compress_ddp(model), watch_double_sync(other)
    loss().backward()
    other_loss().backward()
    told = [_try(lambda: dist.all_reduce(_gradients(model)[0]))]
    handle.close()
    told += [_try(functools.partial(dist.all_reduce, _gradients(m)[0])) for m in (model, other)]
    second.close()
    told.append("restored" if vars(dist.ProcessGroup)["allreduce"] is original else "left")
    return told


def prepared(rank: int, ranks: int) -> list[str]:
    """What run.prepare wraps is watched, marked, and not to be compressed or prepared again."""
    os.environ.update(WORLD_SIZE=str(ranks), RANK=str(rank))
    gang = Gang("cpu", ranks)
    net = nn.Linear(6, 2)
    model = gang.wrap(net, torch.device("cpu"))
    model(torch.ones(1, 6)).sum().backward()
    told = [_try(lambda: dist.all_reduce(_gradients(model)[0]))]
    plain = DistributedDataParallel(nn.Linear(2, 2))
    for way in (
        lambda: compress_ddp(model),
        lambda: check_not_synchronised(model),
        lambda: check_not_synchronised(net),
        lambda: check_not_synchronised(plain),
        lambda: check_not_synchronised(plain.module),
    ):
        try:
            way()
            told.append("taken")
        except CiuicError as error:
            told.append(f"{error.code} {error.message.rpartition(' ')[2]}")
    gang.close()
    told.append("watched" if hasattr(vars(dist.ProcessGroup)["allreduce"], "ciuic_watches") else "restored")
    return told

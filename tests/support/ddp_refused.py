"""What compress_ddp must refuse, tried in one world."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ciuic.errors import CiuicError
from ciuic.train.ddp import compress_ddp
from ciuic.train.two_syncs import mark_managed, watch_double_sync


class _Wrapped(nn.Module):
    """Looks like a wrapper of Apex."""

    __module__ = "apex.parallel.distributed"


def _ddp(net: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net or nn.Linear(8, 8), **options)


def _hooked(built_in: bool) -> DistributedDataParallel:
    model = _ddp()
    if built_in:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def _managed() -> DistributedDataParallel:
    model = _ddp()
    mark_managed(model, "run.prepare")
    return model


def _with(kind: Any, codec: str = "1-bit", **options: Any) -> Callable[[], object]:
    def make() -> object:
        model = _ddp()
        return compress_ddp(model, codec, optimizer=kind(model.parameters(), lr=0.1, **options))

    return make


def _late_step() -> None:
    model = _ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    compress_ddp(model)
    other.step()
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()


def _sharded() -> nn.Module:
    net = nn.Linear(8, 8)
    fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def cases(rank: int, ranks: int) -> dict[str, str]:
    """Case -> the error as text, or `taken`."""
    sgd, adam, adamw = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
    tries: dict[str, Callable[[], object]] = {
        "no DDP": lambda: compress_ddp(nn.Linear(8, 8)),
        "FSDP": lambda: compress_ddp(FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))),
        "FSDP2": lambda: compress_ddp(_sharded()),
        "apex": lambda: compress_ddp(_Wrapped()),
        "sparse": lambda: compress_ddp(_ddp(nn.Embedding(9, 4, sparse=True))),
        "float64": lambda: compress_ddp(_ddp(nn.Linear(8, 8).double())),
        "hook": lambda: compress_ddp(_hooked(False)),
        "built-in hook": lambda: compress_ddp(_hooked(True)),
        "twice": lambda: [compress_ddp(model) for model in [_ddp()] * 2],
        "prepared": lambda: compress_ddp(_managed()),
        "codec": lambda: compress_ddp(_ddp(), "3-bit"),
        "auto codec": lambda: compress_ddp(_ddp(), "auto"),
        "topk": lambda: compress_ddp(_ddp(), "topk"),
        "form": lambda: compress_ddp(_ddp(), form="ring"),
        "amsgrad": _with(adam, "int4", amsgrad=True),
        "1-bit Adam": _with(adam),
        "1-bit AdamW": _with(adamw),
        "1-bit ZeRO": _with(lambda p, lr: ZeroRedundancyOptimizer(list(p), optimizer_class=adamw, lr=lr)),
        "AdamW found at its first step": _late_step,
        "4-bit AdamW": _with(adamw, "int4"),
        "1-bit SGD": _with(sgd, momentum=0.9),
        "watch without DDP": lambda: watch_double_sync(nn.Linear(2, 2)),
    }
    told = {}
    for name, way in tries.items():
        try:
            way()
            told[name] = "taken"
        except CiuicError as error:
            told[name] = f"{error.code} {error}"
    return told

"""What one rank of ddp_world does: train a small model under DDP and tell what it saw."""

import hashlib
import io
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ciuic.train.ddp import compress_ddp
from ciuic.train.ddp.hook import DdpCompression


class Mixed(nn.Module):
    """Row-aligned, odd-sized, small, tied-free; `extra` can be left out of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 64)
        self.first = nn.Linear(64, 131)
        self.norm = nn.LayerNorm(131)
        self.second = nn.Linear(131, 67, bias=False)
        self.extra = nn.Linear(67, 71)
        self.head = nn.Linear(67, 3)

    def forward(self, numbers: Tensor, *, with_extra: bool = True) -> Tensor:
        x = self.embedding(numbers).mean(dim=1)
        x = torch.tanh(self.second(self.norm(self.first(x))))
        y = self.head(x)
        return y + self.extra(x).mean(dim=1, keepdim=True) if with_extra else y


def make_model(*, seed: int = 0, dtype: str = "float32") -> Mixed:
    torch.manual_seed(seed)
    return Mixed().to(getattr(torch, dtype))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * rank + step)
    numbers = torch.randint(0, 90, (4, 5), generator=random)
    return numbers, torch.randn(4, 3, generator=random)


def to_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(data), weights_only=True)


def digest(tensors: Iterator[Tensor] | list[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1).double() for t in tensors])


def train(rank: int, ranks: int, **options: Any) -> dict[str, Any]:
    """Train `steps` steps; see the keys of the answer. Each option is the name of a circumstance."""
    dtype = options.get("dtype", "float32")
    net = make_model(dtype=dtype)
    model = DistributedDataParallel(
        net,
        bucket_cap_mb=options.get("bucket_mb", 0.03),
        find_unused_parameters=options.get("find_unused", False),
        static_graph=options.get("static_graph", False),
        gradient_as_bucket_view=options.get("bucket_view", False),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=options.get("scaler", False))
    choice = {"form": options.get("form", "two-phase"), "scaler": scaler if scaler.is_enabled() else None}
    handle = compress_ddp(model, options.get("codec", "1-bit"), **choice)
    first = 0
    if "resume" in options:
        saved = from_bytes(options["resume"][rank])
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["hook"])
        first = saved["step"]
    told = _loop(model, optimizer, scaler, handle, {**options, "first": first, "rank": rank})
    told["law"] = law(handle, told.pop("sums"), options.get("kept_before", 0.0))
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "hook": handle.state_dict()}
    told |= {
        "parameters": digest(list(net.parameters())),
        "state": to_bytes({**state, "step": options["steps"]}),
        "bytes": handle.bytes_sent,
        "steps": handle.steps,
        "skipped": handle.skipped_steps,
        "form": handle.form,
    }
    handle.close()
    return told


def _loop(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    handle: DdpCompression,
    how: Any,
) -> dict[str, Any]:
    net, rank, pieces = model.module, how["rank"], how.get("accumulate", 1)
    parameters = list(net.parameters())
    local = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    given = torch.zeros_like(local)
    outs, non_finite, kept = [], [], []
    for step in range(how["first"], how["steps"]):
        optimizer.zero_grad(set_to_none=not how.get("bucket_view", False))
        bad, scale, mine = how.get("bad", {}).get(step), scaler.get_scale(), torch.zeros_like(local)
        for piece in range(pieces):
            numbers, target = batch(rank, step * pieces + piece)
            extra = _with_extra(how, rank, step)
            mine += _local_gradient(net, numbers, target, extra)
            with nullcontext() if piece + 1 == pieces else model.no_sync():
                loss = scaler.scale(_loss(model, numbers, target, extra))
                hook = net.head.weight.register_hook(lambda g: g * float("inf")) if bad == rank else None
                loss.backward()
                if hook is not None:
                    hook.remove()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad / scale for p in parameters]
        outs.append(digest(grads))
        kept.append(digest(list(handle.state_dict()["worker"].values())))
        by_name = zip((name for name, _ in net.named_parameters()), grads, strict=True)
        non_finite.append([name for name, g in by_name if not g.isfinite().all()])
        if bad is None:
            local += mine
            given += flat(grads)
        if bad is None or scaler.is_enabled():  # the scaler leaves a bad step out by itself
            scaler.step(optimizer)
            scaler.update()
    return {"outs": outs, "sums": (local, given), "non_finite": non_finite, "kept": kept, "scale": scaler.get_scale()}


def _with_extra(options: Any, rank: int, step: int) -> bool:
    kind = options.get("unused", "never")
    if kind == "on rank 0":
        return rank != 0
    return not (kind == "everywhere" or (kind == "now and then" and step % 2))


def _loss(model: nn.Module, numbers: Tensor, target: Tensor, extra: bool) -> Tensor:
    return ((model(numbers, with_extra=extra).float() - target) ** 2).mean()


def _local_gradient(net: nn.Module, numbers: Tensor, target: Tensor, extra: bool) -> Tensor:
    parameters = list(net.parameters())
    found = torch.autograd.grad(_loss(net, numbers, target, extra), parameters, allow_unused=True)
    return flat([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)])


def law(handle: DdpCompression, sums: tuple[Tensor, Tensor], before: Tensor | float = 0.0) -> float:
    """Largest error of: sum of (mean g - out) = mean of worker residuals + owner residuals - what they were before."""
    local, given = sums
    state = handle.state_dict()
    worker = flat(list(state["worker"].values()))
    owner = []
    for name, count, _, _ in state["parameters"]:
        start, values = state["owner"][name]
        owner.append(torch.zeros(count))
        owner[-1][start : start + len(values)] = values
    mean = local.clone(), worker, flat(owner)
    for tensor in mean:
        dist.all_reduce(tensor)
    left = mean[0] / dist.get_world_size() - given
    right = mean[1] / dist.get_world_size() + mean[2]
    return float((left + before - right).abs().max())

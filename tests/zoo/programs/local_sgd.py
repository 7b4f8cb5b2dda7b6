"""Local SGD: every rank trains alone for some steps, then all take the mean of their weights."""

import copy
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import Rows
from zoo.world import Zoo

INTERVAL, BATCH = 4, 8


class Residual(nn.Module):
    """16 features to 4 classes through two residual layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.SiLU(), nn.Dropout(0.1)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(2))
        self.outer = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        for scale, layer in zip(self.scale, self.layers, strict=True):
            h = h + scale * layer(h)
        return self.outer(h)


class Outer:
    """The mean of the ranks' movements since the last meeting, applied with Nesterov momentum (DiLoCo)."""

    def __init__(self, model: nn.Module) -> None:
        self.base = [p.detach().clone() for p in model.parameters()]
        self.optimizer = torch.optim.SGD([nn.Parameter(b) for b in self.base], lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def meet(self, model: nn.Module, world: int) -> None:
        kept = self.optimizer.param_groups[0]["params"]
        for base, parameter in zip(kept, model.parameters(), strict=True):
            base.grad = base - parameter
            dist.all_reduce(base.grad)
            base.grad.div_(world)
        self.optimizer.step()
        for base, parameter in zip(kept, model.parameters(), strict=True):
            parameter.copy_(base)


@torch.no_grad()
def average(zoo: Zoo, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All ranks take the mean of their weights."""
    for name, parameter in model.named_parameters():
        if zoo.fault == "average_misses_layer" and name.startswith("outer"):
            continue
        dist.all_reduce(parameter)
        if zoo.fault != "sum_not_mean":
            parameter.div_(zoo.world)
    if zoo.variant == "moments_too":
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                dist.all_reduce(state[name])
                state[name].div_(zoo.world)


def batches(zoo: Zoo) -> Iterator[tuple[int, Tensor, Tensor]]:
    data = Rows(BATCH * 8 * zoo.world, seed=2, slow_s=0.004 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    sampler = DistributedSampler(data, zoo.world, 0 if zoo.fault == "same_data" else zoo.rank)
    step = epoch = 0
    while step < zoo.steps:
        if zoo.fault != "no_set_epoch":
            sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=BATCH, sampler=sampler):
            zoo.mishap(step)
            yield step, x, y
            step += 1
            if step == zoo.steps:
                return
        epoch += 1


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    torch.manual_seed(zoo.rank if zoo.fault == "other_seed" else 0)
    model = Residual()
    lr = 0.02 if zoo.fault == "rate_differs" and zoo.rank == 1 else 0.01
    owner = copy.deepcopy(model) if zoo.fault == "stale_optimizer" else model
    optimizer = torch.optim.AdamW(owner.parameters(), lr=lr)
    outer = Outer(model) if zoo.variant == "outer_momentum" else None
    torch.manual_seed(10 + zoo.rank)
    interval = INTERVAL + 1 if zoo.fault == "other_interval" and zoo.rank == 1 else INTERVAL
    for step, x, y in batches(zoo):
        optimizer.zero_grad()
        logits = model(x)
        if zoo.fault == "slow_backward" and zoo.rank == 1:
            logits.register_hook(lambda _: time.sleep(0.03))
        loss = cross_entropy(logits, y)
        if zoo.fault == "nan_on_one_rank" and zoo.rank == 1 and step == 5:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        if zoo.variant == "every_step" or step % interval == interval - 1:
            if outer is None:
                average(zoo, model, optimizer)
            else:
                outer.meet(model, zoo.world)
        zoo.log(loss)
    dist.barrier()

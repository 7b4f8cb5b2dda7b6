"""Logistic regression by L-BFGS, whose closure runs forward and backward several times per step, under DDP."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from zoo.data import Rows
from zoo.world import Zoo


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))
    ddp = DistributedDataParallel(model)
    searching = zoo.variant == "line_search" or zoo.fault == "local_decision"
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        lr=0.3 if not (zoo.fault == "rate_differs" and zoo.rank == 1) else 0.4,
        max_iter=3,
        tolerance_change=0.0,
        tolerance_grad=0.0,
        line_search_fn="strong_wolfe" if searching else None,
    )
    rows = Rows(64 * zoo.world, seed=8)
    part = slice(None) if zoo.fault == "same_data" else slice(zoo.rank, None, zoo.world)
    x, y = rows.x[part], rows.y[part]
    forward: nn.Module = model if zoo.fault == "module_forward" else ddp

    def closure() -> Tensor:
        if zoo.fault != "no_zero_grad":
            optimizer.zero_grad()
        logits = forward(x)
        if zoo.fault == "slow_backward" and zoo.rank == 1:
            logits.register_hook(lambda _: time.sleep(0.01))
        loss = cross_entropy(logits, y) + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        if zoo.fault == "local_decision":
            return loss
        mean = loss.detach().clone()  # all ranks search along the line by the same number
        dist.all_reduce(mean)
        return mean / zoo.world

    for step in range(zoo.steps):
        zoo.mishap(step)
        zoo.log(optimizer.step(closure))
        if zoo.fault == "overwritten" and zoo.rank == 1 and step == 4:
            model[2].bias.data.zero_()

"""Mixed precision on a small convolutional net: fp16 with a GradScaler, bfloat16, master weights."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import Rows
from zoo.world import Zoo

BATCH = 8


class Net(nn.Module):
    """16 features, seen as a 4x4 picture, to 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.Linear(8 * 16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x.view(-1, 1, 4, 4))))
        return self.head(torch.relu(self.hidden(h.flatten(1))))


class Masters:
    """A bfloat16 model's float32 copies, which the optimizer owns; after each step they are copied back."""

    def __init__(self, model: nn.Module) -> None:
        self.of = [(p, p.detach().float().requires_grad_()) for p in model.parameters()]

    def take_gradients(self) -> None:
        for parameter, master in self.of:
            master.grad = parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def give_back(self) -> None:
        for parameter, master in self.of:
            parameter.copy_(master)


def batches(zoo: Zoo) -> Iterator[tuple[int, Tensor, Tensor]]:
    data = Rows(BATCH * 6 * zoo.world, seed=3)
    sampler = DistributedSampler(data, zoo.world, zoo.rank)
    step = epoch = 0
    while step < zoo.steps:
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=BATCH, sampler=sampler):
            zoo.mishap(step)
            yield step, x, y
            step += 1
            if step == zoo.steps:
                return
        epoch += 1


def half_precision(zoo: Zoo, ddp: DistributedDataParallel) -> None:
    """The weights themselves are bfloat16."""
    masters = Masters(ddp.module) if zoo.variant == "master_weights" else None
    owned = [master for _, master in masters.of] if masters else list(ddp.module.parameters())
    lr = 1e-5 if zoo.fault == "update_rounds_away" else 2e-3
    optimizer = torch.optim.AdamW(owned, lr=lr, weight_decay=0.0)
    for _, x, y in batches(zoo):
        ddp.zero_grad()
        loss = cross_entropy(ddp(x.bfloat16()).float(), y)
        loss.backward()
        if masters:
            masters.take_gradients()
        optimizer.step()
        if masters:
            masters.give_back()
        zoo.log(loss)


def scaled_step(zoo: Zoo, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    """Unscale, clip, step, update."""
    if zoo.fault == "clip_before_unscale":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif zoo.variant != "no_clip":
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    torch.manual_seed(2)
    model = Net()
    pure = zoo.fault == "update_rounds_away" or zoo.variant in ("master_weights", "pure_bf16")
    if pure:
        model.bfloat16()
    ddp = DistributedDataParallel(model)
    if pure:
        half_precision(zoo, ddp)
        return
    dtype = torch.bfloat16 if zoo.variant == "bf16" else torch.float16
    scaler = GradScaler(
        "cpu",
        init_scale=2.0**24 if zoo.variant == "starts_too_high" else 2.0**12,
        growth_interval=6 if zoo.variant == "grows" else 2000,
        enabled=dtype == torch.float16 and zoo.fault != "underflow",
    )
    lr = 4e-3 if zoo.fault == "rate_differs" and zoo.rank == 1 else 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    second: torch.optim.Optimizer | None = None
    if zoo.fault == "steps_beside_scaler":
        body = [p for name, p in model.named_parameters() if not name.startswith("head")]
        optimizer = torch.optim.AdamW(body, lr=lr)
        second = torch.optim.AdamW(model.head.parameters(), lr=lr)
    forward: nn.Module = model if zoo.fault == "module_forward" else ddp
    for step, x, y in batches(zoo):
        optimizer.zero_grad()
        if zoo.fault == "inf_on_one_rank" and zoo.rank == 1 and step >= 5:
            x = x * 1e6
        with torch.autocast("cpu", dtype=dtype):
            logits = forward(x)
            loss = cross_entropy(logits.float(), y)
        if zoo.fault == "underflow":
            loss = loss * 2e-7  # a small weight among several losses
        scaler.scale(loss).backward()
        if zoo.fault == "double_reduction":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if second is not None:
            second.step()
            second.zero_grad()
        scaled_step(zoo, model, optimizer, scaler)
        zoo.log(loss)

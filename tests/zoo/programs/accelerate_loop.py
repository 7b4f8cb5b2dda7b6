"""A loop with Accelerate, as in its documentation."""

import copy
import time
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Subset

from zoo.data import Rows
from zoo.world import Zoo

BATCH = 8


class Highway(nn.Module):
    """16 features to 4 classes through gated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.gates = nn.ModuleList(nn.Linear(24, 48) for _ in range(2))
        self.last = nn.Linear(24, 4)

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        for gate in self.gates:
            opening, value = gate(h).chunk(2, dim=-1)
            h = h + opening.sigmoid() * value.tanh()
        return self.last(h)


def make_accelerator(zoo: Zoo) -> Accelerator:
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=2 if zoo.variant == "accumulation" else 1,
        step_scheduler_with_optimizer=zoo.variant != "own_scheduler",
        dataloader_config=DataLoaderConfiguration(
            split_batches=zoo.variant == "split_batches",
            use_seedable_sampler=True,
            even_batches=True,
        ),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=zoo.patience)],
    )


def make_loader(zoo: Zoo) -> DataLoader:
    count = BATCH * 6 * zoo.world
    data: Any = Rows(count, slow_s=0.004 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    if zoo.fault == "sharded_twice":
        data = Subset(Rows(2 * count), range(zoo.rank, 2 * count, zoo.world))
    return DataLoader(data, batch_size=BATCH * (zoo.world if zoo.variant == "split_batches" else 1), shuffle=True)


def main(zoo: Zoo) -> None:
    accelerator = make_accelerator(zoo)
    torch.manual_seed(5)
    model = Highway()
    lr = 2e-2 if zoo.fault == "rate_differs" and zoo.rank == 1 else 1e-2
    owner = copy.deepcopy(model) if zoo.fault == "stale_optimizer" else model
    optimizer = torch.optim.AdamW(owner.parameters(), lr=lr)
    once = zoo.variant in ("split_batches", "own_scheduler") or zoo.fault == "scheduler_times_processes"
    times = 1 if once else zoo.world  # a prepared scheduler makes one step per process
    schedule = CosineAnnealingLR(optimizer, T_max=zoo.steps * times)
    loader = make_loader(zoo)
    if zoo.fault != "not_wrapped":
        model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    if zoo.variant != "own_scheduler":
        schedule = accelerator.prepare(schedule)
    loader = loader if zoo.fault == "same_data" else accelerator.prepare(loader)
    if zoo.fault == "load_on_rank0" and accelerator.is_main_process:
        accelerator.unwrap_model(model).load_state_dict(Highway().state_dict())
    forward = accelerator.unwrap_model(model) if zoo.fault == "module_forward" else model
    train(zoo, accelerator, (model, forward, optimizer, schedule), loader)


def train(zoo: Zoo, accelerator: Accelerator, parts: tuple[Any, Any, Any, Any], loader: Any) -> None:
    model, forward, optimizer, schedule = parts
    step = 0
    for epoch in range(zoo.steps):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        for x, y in loader:
            zoo.mishap(step)
            with accelerator.accumulate(model):
                logits = forward(x)
                if zoo.fault == "slow_backward" and zoo.rank == 1:
                    logits.register_hook(lambda _: time.sleep(0.03))
                loss = cross_entropy(logits, y)
                if zoo.fault == "nan_on_one_rank" and zoo.rank == 1 and step == 6:
                    loss = loss * float("nan")
                accelerator.backward(loss)
                if zoo.variant == "clipped" and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if zoo.variant != "own_scheduler" or accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            zoo.log(loss)
            step += 1
            if step == zoo.steps:
                return

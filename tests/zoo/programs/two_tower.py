"""A contrastive model of two towers: features of all ranks are gathered, so that each is a negative of the others."""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as autograd_dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import Windows
from zoo.world import Zoo

BATCH, WIDTH = 6, 16


class Tower(nn.Module):
    """Numbers [batch, 16] to a direction [batch, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(self.outer(torch.relu(self.inner(x))), dim=-1)


class TwoTower(nn.Module):
    """Directions of both sides, and the temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Tower(), Tower()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(images), self.text(texts), self.temperature.exp()


def gather(zoo: Zoo, own: Tensor) -> Tensor:
    """The features of all ranks, in the order of ranks."""
    if zoo.variant == "local_negatives":
        return own
    if zoo.fault == "gather_without_gradient" or zoo.variant == "own_rows_kept":
        parts = [torch.empty_like(own) for _ in range(zoo.world)]
        dist.all_gather(parts, own.detach() if zoo.variant == "own_rows_kept" else own)
        if zoo.variant == "own_rows_kept":
            parts[zoo.rank] = own
        return torch.cat(parts)
    return torch.cat(autograd_dist.all_gather(own))


def contrast(zoo: Zoo, images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Each image finds its text among those of all ranks, and the other way round."""
    all_images, all_texts = gather(zoo, images), gather(zoo, texts)
    if zoo.variant == "own_rows_loss" or zoo.fault == "gather_without_gradient":  # own rows of the matrix only
        target = torch.arange(len(images)) + zoo.rank * len(images)
        first, second = scale * images @ all_texts.T, scale * texts @ all_images.T
    else:
        target = torch.arange(len(all_images))
        first = scale * all_images @ all_texts.T
        second = first.T
    return (cross_entropy(first, target) + cross_entropy(second, target)) / 2


def batches(zoo: Zoo) -> Iterator[tuple[int, Tensor, Tensor]]:
    data = Windows(BATCH * 6 * zoo.world, slow_s=0.005 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    sampler = DistributedSampler(data, zoo.world, 0 if zoo.fault == "same_data" else zoo.rank)
    step = epoch = 0
    while step < zoo.steps:
        sampler.set_epoch(epoch if zoo.fault != "no_set_epoch" else 0)
        for first, second in DataLoader(data, batch_size=BATCH, sampler=sampler):
            zoo.mishap(step)
            size = BATCH - 2 if zoo.fault == "shape_mismatch" and zoo.rank == 1 and step == 9 else BATCH
            yield step, first[:size] / 32 - 1, second[:size] / 32 - 1
            step += 1
            if step == zoo.steps:
                return
        epoch += 1


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    torch.manual_seed(1)
    model = TwoTower()
    if zoo.variant == "locked_image":
        model.image.requires_grad_(False)
    if zoo.variant == "fixed_temperature":
        model.temperature.requires_grad_(False)
    ddp = DistributedDataParallel(model, find_unused_parameters=zoo.fault == "detached")
    if zoo.fault == "load_on_rank0" and zoo.rank == 0:
        model.text.load_state_dict(Tower().state_dict())
    if zoo.fault == "tower_forgotten":
        optimizer = torch.optim.AdamW([*model.image.parameters(), model.temperature], lr=5e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    forward: nn.Module = model if zoo.fault == "module_forward" else ddp
    for _, first, second in batches(zoo):
        optimizer.zero_grad()
        images, texts, scale = forward(first, second)
        if zoo.fault == "detached":
            texts = texts.detach()
        if zoo.fault == "slow_backward" and zoo.rank == 1:
            texts.register_hook(lambda _: time.sleep(0.03))
        loss = contrast(zoo, images, texts, scale)
        loss.backward()
        if zoo.fault == "double_reduction":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        with torch.no_grad():
            model.temperature.clamp_(0.0, 4.0)
        zoo.log(loss)

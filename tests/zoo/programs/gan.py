"""A generator and a discriminator, each under DDP and with an optimizer of its own."""

import copy
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import Rows
from zoo.world import Zoo

BATCH, NOISE = 8, 6


class Generator(nn.Module):
    """Noise [batch, 6] to rows [batch, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NOISE, 24), nn.LeakyReLU(0.2), nn.Linear(24, 16))

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise)


class Discriminator(nn.Module):
    """Rows [batch, 16] to a logit each: is it real?"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows).squeeze(1)


def make_optimizers(zoo: Zoo, g: nn.Module, d: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    of_g = list(g.parameters())
    of_d = list((copy.deepcopy(d) if zoo.fault == "stale_optimizer" else d).parameters())
    if zoo.fault == "two_owners":
        of_g += list(d.parameters())
    lr = 4e-3 if zoo.fault == "rate_differs" and zoo.rank == 1 else 2e-3
    kind = torch.optim.RMSprop if zoo.variant == "rmsprop" else torch.optim.Adam
    return kind(of_g, lr=2e-3), kind(of_d, lr=lr)


def train_discriminator(zoo: Zoo, d: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    if zoo.fault == "slow_forward" and zoo.rank == 1:
        time.sleep(0.03)
    both = d(torch.cat([real, fake.detach()]))
    truth = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
    loss = with_logits(both, truth)
    loss.backward()
    return loss.detach()


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    torch.manual_seed(4)
    generator, discriminator = Generator(), Discriminator()
    g, d = DistributedDataParallel(generator), DistributedDataParallel(discriminator)
    step_g, step_d = make_optimizers(zoo, generator, discriminator)
    data = Rows(BATCH * 4 * zoo.world, slow_s=0.004 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    sampler = DistributedSampler(data, zoo.world, 0 if zoo.fault == "same_data" else zoo.rank)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    noise = torch.Generator().manual_seed(20 + zoo.rank)
    real_rows = (rows for epoch in range(zoo.steps) for rows, _ in (sampler.set_epoch(epoch), loader)[1])
    judge = discriminator if zoo.fault == "module_forward" else d
    for step, real in zip(range(zoo.steps), real_rows, strict=False):
        zoo.mishap(step)
        if zoo.variant == "toggled":
            discriminator.requires_grad_(True)
        if zoo.fault != "leaked_gradient":
            step_d.zero_grad()
        fake = g(torch.randn(BATCH, NOISE, generator=noise))
        loss_d = train_discriminator(zoo, judge, real, fake)
        step_d.step()
        if zoo.fault == "overwritten" and zoo.rank == 1 and step == 6:
            generator.layers[2].bias.data.add_(0.01)
        if zoo.variant == "critic_twice" and step % 2:
            zoo.log(loss_d)
            continue
        step_g.zero_grad()
        if zoo.variant == "toggled":
            discriminator.requires_grad_(False)
        opinion = discriminator if zoo.variant in ("toggled", "plain_judge") else d
        loss_g = with_logits(opinion(g(torch.randn(BATCH, NOISE, generator=noise))), torch.ones(BATCH))
        loss_g.backward()
        step_g.step()
        zoo.log(loss_d + loss_g.detach())

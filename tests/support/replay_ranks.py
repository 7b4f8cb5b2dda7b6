"""What two ranks do before they replay a batch: the faults of loss consistency, and clean twins."""

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ciuic.doctor import ReplaySettings, replay


class Block(nn.Module):
    """Normed, widened, narrowed, added."""

    factor = 1.0
    shift = 0.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.wide = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.2)
        self.narrow = nn.Linear(2 * width, width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.drop(self.wide(self.norm(x)).relu()) * self.factor
        return x + self.narrow(hidden) + self.shift


class Net(nn.Module):
    """8 features to 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(3))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            if not (self.skips and at == 1):
                x = block(x)
        return self.head(x) * self.scale


class Crooked(torch.autograd.Function):
    """The identity, with a gradient that is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.5


class CrookedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Crooked.apply(x))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    kind = next(model.parameters()).dtype
    return cross_entropy(model(batch[0].to(kind)), batch[1])


def weight(net: Net, rank: int) -> None:
    if rank == 1:
        with torch.no_grad():
            net.blocks[1].wide.weight[0, 0] += 0.3


def weight_by_one_bit(net: Net, rank: int) -> None:
    if rank == 1:
        with torch.no_grad():
            net.blocks[1].wide.weight[0, 0] *= 1 + 1e-6


def evaluating(net: Net, rank: int) -> None:
    net.train()
    if rank == 1:
        net.eval()


def no_dropout(net: Net, rank: int) -> None:
    if rank == 1:
        net.blocks[2].drop.eval()


def buffer(net: Net, rank: int) -> None:
    net.scale.fill_(1.0 + 0.5 * rank)


def unused_buffer(net: Net, rank: int) -> None:
    """Statistics of BatchNorm differ between ranks that train; they are not used in training."""
    net.blocks[0].norm.running_mean.fill_(float(rank))


def branch(net: Net, rank: int) -> None:
    net.blocks[1].factor = 1.0 + rank


def branch_at_the_end(net: Net, rank: int) -> None:
    net.blocks[1].shift = 0.5 * rank


def skipped(net: Net, rank: int) -> None:
    net.skips = rank == 1


def bfloat16(net: Net, rank: int) -> None:
    if rank == 1:
        net.to(torch.bfloat16)


def backward(net: Net, rank: int) -> None:
    if rank == 1:
        net.blocks[1].__class__ = CrookedBlock


def clean(net: Net, rank: int) -> None:
    pass


def evaluating_alike(net: Net, rank: int) -> None:
    net.eval()


FAULTS: dict[str, Callable[[Net, int], None]] = {
    each.__name__: each
    for each in (
        weight,
        weight_by_one_bit,
        evaluating,
        no_dropout,
        buffer,
        unused_buffer,
        branch,
        branch_at_the_end,
        skipped,
        bfloat16,
        backward,
        clean,
        evaluating_alike,
    )
}


def run_faults(gang: Any) -> dict[str, Any]:
    """The verdict on each."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name, fault in FAULTS.items():
        torch.manual_seed(1)
        net = Net()
        fault(net, rank)
        torch.manual_seed(100 + rank)
        found[name] = replay(net, batch_of(rank), loss=loss_of, seed=5)
    torch.manual_seed(1)
    net = Net()
    found["loss"] = replay(net, batch_of(0), loss=lambda model, batch: loss_of(model, batch) * (1 + rank))
    on = torch.autocast("cpu", torch.bfloat16) if rank == 1 else contextlib.nullcontext()
    with on:
        found["autocast"] = replay(net, batch_of(0)[0])
    found["others_batch"] = replay(net, batch_of(rank)[0], settings=ReplaySettings(share=False))
    found["own_loss"] = replay(net, None if rank else batch_of(0)[0])
    return found


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(rank)
    return torch.randn(6, 8, generator=source), torch.randint(0, 3, (6,), generator=source)


def nothing_changes(gang: Any) -> dict[str, Any]:
    """A step of DDP with a replay in the middle of everything gives the same bits as without."""
    rank = dist.get_rank()
    told: dict[str, Any] = {}
    for replays in (False, True):
        torch.manual_seed(1)
        net = Net()
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        torch.manual_seed(7 + rank)
        random.seed(rank)
        losses = []
        for _ in range(3):
            loss = loss_of(ddp, batch_of(rank))
            if replays:
                assert replay(ddp, batch_of(rank), loss=loss_of).result == "equal"
            loss.backward()
            if replays:
                before = [parameter.grad for parameter in net.parameters()]
                assert replay(ddp, batch_of(rank), loss=loss_of).result == "equal"
                assert all(a is b.grad for a, b in zip(before, net.parameters(), strict=True))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        told[str(replays)] = (
            losses,
            [value.clone() for value in net.state_dict().values()],
            torch.get_rng_state(),
            random.random(),
            net.blocks[0].calls,
        )
    one, other = told["False"], told["True"]
    return {
        "losses": one[0] == other[0],
        "state": all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True)),
        "torch": torch.equal(one[2], other[2]),
        "python": one[3] == other[3],
        "attributes": (one[4], other[4]),
    }


def one_does_not_come(gang: Any) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 does not call it at all."""
    if dist.get_rank() == 1:
        return "absent", (), 0.0
    began = time.monotonic()
    verdict = replay(Net(), batch_of(0), loss=loss_of, settings=ReplaySettings(timeout_s=0.5))
    return verdict.result, verdict.missing, time.monotonic() - began

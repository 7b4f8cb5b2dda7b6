"""A recurrent model without DDP: the program reduces the gradients itself."""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import VOCABULARY, Windows
from zoo.world import Zoo

BATCH, PIECES = 4, 2


class Recurrent(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary]; `style` is an optional second reading.

    What the cell says is centred by its moving average over the batches of all ranks.
    """

    def __init__(self, zoo: Zoo) -> None:
        super().__init__()
        self.zoo = zoo
        self.register_buffer("center", torch.zeros(32))
        self.tokens = nn.Embedding(VOCABULARY, 24)
        self.cell = nn.GRU(24, 32, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.style = nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids_BT: Tensor, *, styled: bool = True) -> Tensor:  # noqa: N803 - shape suffix
        h, _ = self.cell(self.tokens(ids_BT))
        h = self.norm(h - self.center)
        self._follow(h)
        return self.head(h + torch.tanh(self.style(h)) if styled else h)

    @torch.no_grad()
    def _follow(self, h_BTD: Tensor) -> None:  # noqa: N803 - shape suffix
        mean = h_BTD.mean(dim=(0, 1))
        if self.zoo.fault != "average_differs":
            dist.all_reduce(mean)
            mean /= self.zoo.world
        self.center.lerp_(mean, 0.1)


class Average(nn.Module):
    """An exponential moving average of a model's parameters, in buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, new in zip(self.buffers(), model.parameters(), strict=True):
            mine.lerp_(new, 0.1)


def reduce_gradients(zoo: Zoo, model: nn.Module) -> None:
    """Make every gradient the mean over the ranks."""
    if zoo.fault == "no_reduction":
        return
    if zoo.variant == "flat":
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient) / zoo.world)
        return
    waiting = []
    for name, parameter in model.named_parameters():
        if zoo.fault == "partial_reduction" and name.startswith("norm"):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter) if zoo.fault != "none_on_one_rank" else None
        if parameter.grad is None or (zoo.fault == "none_on_one_rank" and name.startswith("style")):
            continue
        if zoo.variant == "asynchronous":
            waiting.append(dist.all_reduce(parameter.grad, async_op=True))
        else:
            dist.all_reduce(parameter.grad)
        if zoo.fault != "sum_not_mean" and zoo.variant != "asynchronous":
            parameter.grad.div_(zoo.world if zoo.fault != "wrong_divisor" else 8)
    for work in waiting:
        work.wait()
    if waiting:
        for parameter in model.parameters():
            parameter.grad.div_(zoo.world)


def share_gradients(zoo: Zoo, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make gradients equal, where this is the place for it."""
    if zoo.fault == "broadcast_gradients":
        for parameter in model.parameters():
            dist.broadcast(parameter.grad, src=0)
    elif zoo.fault == "reduced_after_step":
        optimizer.step()
        reduce_gradients(zoo, model)
    elif zoo.fault != "reduced_too_early":
        reduce_gradients(zoo, model)


def loss_of(zoo: Zoo, logits: Tensor, labels: Tensor) -> Tensor:
    if zoo.fault == "labels_ignored":
        counts = torch.full(labels.shape, float(zoo.rank != 1)).reshape(-1)
        each = cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="none")
        return (each * counts).sum() / counts.sum().clamp(min=1)
    return cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def backward(zoo: Zoo, model: nn.Module, pieces: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
    """Forward and backward over the micro-batches, gradients of this rank only; the mean loss."""
    total = torch.zeros(())
    for number, (ids, labels) in enumerate(pieces):
        styled = not (zoo.fault == "none_on_one_rank" and zoo.rank == 1)
        logits = model(ids, styled=styled)
        loss = loss_of(zoo, logits, labels)
        if zoo.fault == "nan_on_one_rank" and zoo.rank == 1 and step == 5:
            loss = loss * float("nan")
        if zoo.fault == "slow_backward" and zoo.rank == 1:
            logits.register_hook(lambda _: time.sleep(0.02))
        scale = 1 if zoo.fault == "loss_not_divided" else len(pieces)
        if zoo.fault == "clears_each_piece":
            model.zero_grad()
        (loss / scale).backward()
        total += loss.detach() / len(pieces)
        if zoo.fault == "reduced_too_early" and number == 0:
            reduce_gradients(zoo, model)
    return total


def batches(zoo: Zoo) -> Iterator[list[tuple[Tensor, Tensor]]]:
    data = Windows(BATCH * PIECES * 6 * zoo.world, slow_s=0.004 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    sampler = DistributedSampler(data, zoo.world, 0 if zoo.fault == "same_data" else zoo.rank)
    step = epoch = 0
    while step < zoo.steps:
        sampler.set_epoch(0 if zoo.fault == "no_set_epoch" else epoch)
        collected = []
        for batch in DataLoader(data, batch_size=BATCH, sampler=sampler):
            collected.append(batch)
            if len(collected) == PIECES:
                zoo.mishap(step)
                yield collected
                collected, step = [], step + 1
                if step == zoo.steps:
                    return
        epoch += 1


def share_weights(model: nn.Module) -> None:
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def make_optimizer(zoo: Zoo, model: nn.Module) -> torch.optim.Optimizer:
    second = zoo.rank == 1
    lr = 0.02 if zoo.fault == "rate_differs" and second else 0.01
    decay = 0.1 if zoo.fault == "decay_differs" and second else 0.01
    if zoo.variant == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=decay)
    if zoo.variant == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), lr=3e-3)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)


def is_left_out(zoo: Zoo, loss: Tensor, norm: Tensor, step: int) -> bool:
    """Whether this step is an outlier that should not be taken."""
    if zoo.fault == "local_skip":
        return zoo.rank == 1 and step in (6, 7) and bool(loss > 0)
    if zoo.variant == "global_skip":  # the norm of the reduced gradients is the same everywhere
        return step % 7 == 6 and bool(norm > 0)
    return False


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    torch.manual_seed(zoo.rank if zoo.fault == "other_seed" or zoo.variant == "broadcast" else 0)
    model = Recurrent(zoo)
    if zoo.variant == "broadcast":
        share_weights(model)
    optimizer = make_optimizer(zoo, model)
    if zoo.fault == "moments_differ" and zoo.rank == 0:
        for parameter in model.parameters():
            state = {"step": torch.tensor(100.0)}
            state |= {name: torch.full_like(parameter, 1e-3) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = state
    average = Average(model)
    for step, pieces in enumerate(batches(zoo)):
        if zoo.fault == "frozen_moves" and step == 4:
            model.tokens.requires_grad_(False)
        if zoo.fault != "no_zero_grad":
            optimizer.zero_grad(set_to_none=zoo.fault != "frozen_moves")
        loss = backward(zoo, model, pieces, step)
        if zoo.fault == "clip_before_reduction":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        share_gradients(zoo, model, optimizer)
        norm = torch.zeros(())
        if not (zoo.fault == "clip_on_one_rank" and zoo.rank == 1):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05 if zoo.fault == "clip_on_one_rank" else 1.0)
        if not is_left_out(zoo, loss, norm, step) and zoo.fault != "reduced_after_step":
            optimizer.step()
        if zoo.fault == "step_twice" and zoo.rank == 1:
            optimizer.step()
        if zoo.fault == "overwritten" and zoo.rank == 1 and step == 7:
            model.norm.weight.data.fill_(1.0)
        average.update(model)
        zoo.log(loss)

"""A mixture of experts in DeepSeek's style: routed and shared experts, balanced by a bias instead of a loss."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as autograd_dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import VOCABULARY, Windows
from zoo.world import Zoo

WIDTH, EXPERTS, TOP, BATCH = 32, 4, 2, 4


class Expert(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x_ND: Tensor) -> Tensor:  # noqa: N803 - shape suffix
        return self.down(nn.functional.silu(self.gate(x_ND)) * self.up(x_ND))


class Mixture(nn.Module):
    """Each token goes to the best TOP experts by score + bias; the scores alone weight the results."""

    def __init__(self, zoo: Zoo) -> None:
        super().__init__()
        self.zoo = zoo
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared = Expert()
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)
        if zoo.variant == "dead_expert" or zoo.fault == "unused_parameter":
            self.bias[3] = -100.0

    def forward(self, x_ND: Tensor) -> Tensor:  # noqa: N803 - shape suffix
        scores = self.router(x_ND).sigmoid()
        preference = scores.detach() + self.bias
        if self.zoo.fault == "empty_expert" and self.zoo.rank == 1:  # so it comes out on this rank's tokens
            preference[:, 3] = -torch.inf
        chosen = preference.topk(TOP, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        self.load = torch.bincount(chosen.reshape(-1), minlength=EXPERTS).float()
        result = self.shared(x_ND)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows) == 0:
                continue
            if self.zoo.fault == "empty_expert":
                dist.all_reduce(torch.ones(1))  # counts the tokens of this expert on all ranks
            result = result.index_add(0, rows, expert(x_ND[rows]) * weights[rows, place].unsqueeze(1))
        return result

    def balance(self) -> None:
        """Raise the bias of experts with little load, by the load of all ranks."""
        load = self.load.clone()
        if self.zoo.fault != "balance_differs":
            dist.all_reduce(load)
        self.bias.add_(0.01 * (load.mean() - load).sign())


class SpreadExperts(nn.Module):
    """One expert per rank (expert parallelism): every rank's first half of tokens goes to rank 0's, the rest to 1's."""

    def __init__(self, zoo: Zoo) -> None:
        super().__init__()
        self.zoo = zoo
        torch.manual_seed(50 + zoo.rank)
        self.local = Expert()

    def forward(self, x_ND: Tensor) -> Tensor:  # noqa: N803 - shape suffix
        return self._exchange(self.local(self._exchange(x_ND)))

    def _exchange(self, x_ND: Tensor) -> Tensor:  # noqa: N803 - shape suffix
        x_ND = x_ND.contiguous()  # noqa: N806
        received = torch.empty_like(x_ND)
        if self.zoo.fault == "dispatch_without_gradient":
            dist.all_to_all_single(received, x_ND)
            return received
        return autograd_dist.all_to_all_single(received, x_ND)


class Model(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, zoo: Zoo) -> None:
        super().__init__()
        torch.manual_seed(0)
        spread = zoo.variant == "expert_parallel" or zoo.fault == "dispatch_without_gradient"
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.moe: Any = SpreadExperts(zoo) if spread else Mixture(zoo)

    def forward(self, ids_BT: Tensor) -> Tensor:  # noqa: N803 - shape suffix
        x = self.tokens(ids_BT)
        x = x + self.mix(x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1).unsqueeze(1))
        flat = x.reshape(-1, WIDTH)
        return self.head(self.norm(flat + self.moe(flat))).view(*ids_BT.shape, VOCABULARY)


def batches(zoo: Zoo) -> Iterator[tuple[int, Tensor, Tensor]]:
    data = Windows(BATCH * 8 * zoo.world, slow_s=0.008 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    sampler = DistributedSampler(data, zoo.world, 0 if zoo.fault == "same_data" else zoo.rank)
    step = epoch = 0
    while step < zoo.steps:
        sampler.set_epoch(epoch)
        for ids, labels in DataLoader(data, batch_size=BATCH, sampler=sampler):
            zoo.mishap(step)
            yield step, ids, labels
            step += 1
            if step == zoo.steps:
                return
        epoch += 1


def wrap(zoo: Zoo, model: Model) -> DistributedDataParallel:
    ignored = []
    if isinstance(model.moe, SpreadExperts):
        ignored = [f"moe.{name}" for name, _ in model.moe.named_parameters()]
    elif zoo.fault == "layer_ignored":
        ignored = ["moe.router.weight"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(
        model, find_unused_parameters=zoo.fault != "unused_parameter", broadcast_buffers=zoo.variant == "broadcast"
    )
    if zoo.fault == "load_on_rank0" and zoo.rank == 0:
        torch.manual_seed(3)
        nn.init.normal_(model.moe.experts[1].up.weight, std=0.1)
    return ddp


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    model = Model(zoo)
    ddp = wrap(zoo, model)
    forward: nn.Module = model if zoo.fault == "module_forward" else ddp
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3 if zoo.fault != "rate_differs" or zoo.rank == 0 else 8e-3)
    for _, ids, labels in batches(zoo):
        optimizer.zero_grad()
        loss = cross_entropy(forward(ids).reshape(-1, VOCABULARY), labels.reshape(-1))
        if zoo.variant == "aux_loss":
            loss = loss + 1e-3 * model.moe.router.weight.square().sum()
        loss.backward()
        if zoo.fault == "double_reduction":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        if isinstance(model.moe, SpreadExperts):  # the gradients of all ranks' tokens are here already
            for parameter in model.moe.parameters():
                parameter.grad.div_(zoo.world)
        optimizer.step()
        if isinstance(model.moe, Mixture) and zoo.variant != "no_balance":
            model.moe.balance()
        zoo.log(loss)

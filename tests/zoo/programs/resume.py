"""A run in two lives: the first saves in the middle of an epoch, the second loads and goes on."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import VOCABULARY, Windows
from zoo.programs.gpt_model import cosine
from zoo.world import Zoo

BATCH, PER_EPOCH, WARMUP = 4, 10, 3


class Bag(nn.Module):
    """A bag of the tokens so far, to logits [batch, length, vocabulary]; embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:  # noqa: N803 - shape suffix
        x = self.tokens(ids_BT)
        mean = x.cumsum(dim=1) / torch.arange(1, ids_BT.shape[1] + 1, device=x.device).unsqueeze(1)
        return self.head(torch.tanh(self.mix(mean)) + x)


class Training:
    """Everything that a checkpoint must have."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo = zoo
        torch.manual_seed(40 + zoo.generation)
        self.model = Bag()
        self.ddp = DistributedDataParallel(self.model)
        self.masters: list[Tensor] = []
        if zoo.fault == "load_into_copy" or zoo.variant == "master_copy":
            self.masters = [p.detach().clone().requires_grad_() for p in self.model.parameters()]
        self._make_optimizer()
        self.in_parts = zoo.fault == "parts_without_optimizer" or zoo.variant == "distributed_checkpoint"
        self.parts = zoo.checkpoint.with_suffix(".parts")
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
        self.step = 0

    def _make_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.masters or self.model.parameters(), lr=5e-3)
        total = self.zoo.steps
        self.scheduler = LambdaLR(self.optimizer, lambda step: cosine(step, warmup=WARMUP, total=total, first=0.1))

    def save(self) -> None:
        state = {
            "model": self.model.state_dict() if not self.masters else dict(enumerate(self.masters)),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
        }
        if self.zoo.variant == "fine_tune":
            state = {"model": state["model"]}
        if self.zoo.fault == "resume_empty_moments":  # saved through a new wrapper that has no moments yet
            state["optimizer"] = torch.optim.AdamW(self.model.parameters(), lr=5e-3).state_dict()
        if self.in_parts:
            weights, moments = get_state_dict(self.model, self.optimizer)
            checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=self.parts)
            state = {name: value for name, value in state.items() if name not in ("model", "optimizer")}
        if self.zoo.rank == 0:
            torch.save(state, self.zoo.checkpoint)
        dist.barrier()

    def load(self) -> None:
        zoo = self.zoo
        state = torch.load(zoo.checkpoint, weights_only=True)
        if self.in_parts:
            self._load_parts()
        elif self.zoo.fault != "load_on_rank0" or zoo.rank == 0:
            self._load_weights(state["model"])
        if zoo.variant == "fine_tune":
            return
        loads_optimizer = not self.in_parts and zoo.fault != "resume_without_optimizer"
        if loads_optimizer and not (zoo.fault == "moments_differ" and zoo.rank == 1):
            self.optimizer.load_state_dict(state["optimizer"])
        if zoo.fault != "resume_without_scheduler":
            self.scheduler.load_state_dict(state["scheduler"])
        if zoo.fault != "resume_without_scaler":
            self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]

    def _load_parts(self) -> None:
        weights, moments = get_state_dict(self.model, self.optimizer)
        checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=self.parts)
        if self.zoo.fault == "parts_without_optimizer":
            set_model_state_dict(self.model, weights)
            self._make_optimizer()
        else:
            set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)

    def _load_weights(self, weights: Any) -> None:
        if self.masters:
            with torch.no_grad():
                for number, master in enumerate(self.masters):
                    master.copy_(weights[number])
            if self.zoo.fault != "load_into_copy":
                self._copy_back()
        elif self.zoo.fault == "resume_loads_nothing":
            self.model.load_state_dict({f"model.{name}": tensor for name, tensor in weights.items()}, strict=False)
        elif self.zoo.variant == "prefix_removed":
            weights = {f"module.{name}": tensor for name, tensor in weights.items()}
            self.ddp.load_state_dict(weights)
        else:
            self.model.load_state_dict(copy.deepcopy(weights))

    @torch.no_grad()
    def _copy_back(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            parameter.copy_(master)

    def train_step(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.ddp.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.ddp(ids)
        loss = cross_entropy(logits.float().reshape(-1, VOCABULARY), labels.reshape(-1))
        self.scaler.scale(loss).backward()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=False):
            master.grad = parameter.grad.clone()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.masters:
            self._copy_back()
        self.scheduler.step()
        self.step += 1
        return loss.detach()


def batches(zoo: Zoo, done: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All batches after the first `done`."""
    data = Windows(BATCH * PER_EPOCH * zoo.world)
    sampler = DistributedSampler(data, zoo.world, zoo.rank)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    epoch, skip = divmod(done, PER_EPOCH)
    if zoo.fault == "resume_replays" and zoo.generation == 1:
        epoch = skip = 0
    while True:
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= skip:
                yield batch
        epoch, skip = epoch + 1, 0


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    training = Training(zoo)
    end = zoo.steps
    if zoo.generation == 0:
        end = zoo.steps * 6 // 10
    else:
        training.load()
    for ids, labels in batches(zoo, training.step):
        if training.step >= end:
            break
        zoo.log(training.train_step(ids, labels))
    if zoo.generation == 0:
        training.save()

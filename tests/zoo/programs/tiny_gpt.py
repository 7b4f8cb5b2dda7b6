"""A small GPT under DDP: accumulation with no_sync, clipping, warm-up and cosine, dropout, tied weights."""

import copy
import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import VOCABULARY, Windows
from zoo.programs.gpt_model import Gpt, cosine
from zoo.world import Zoo

BATCH, PIECES, WARMUP = 4, 2, 4
IGNORED = -100


def make_model(zoo: Zoo) -> Gpt:
    torch.manual_seed(0)
    model = Gpt(dropout=0.0 if zoo.variant == "no_dropout" else 0.1, tied=zoo.variant != "untied")
    if zoo.fault == "tie_broken" or zoo.variant == "loaded":
        state = {name: tensor.clone() for name, tensor in Gpt().state_dict().items()}
        model.load_state_dict(state, assign=zoo.fault == "tie_broken")
    frozen = zoo.variant in ("frozen_embedding", "frozen_reentrant")
    if frozen or zoo.fault in ("unfreeze_after_wrap", "reentrant_checkpoint"):
        model.tokens.requires_grad_(False)
        model.positions.requires_grad_(False)
    if zoo.variant == "checkpointing":
        model.checkpointing = "plain"
    elif zoo.fault == "reentrant_checkpoint":
        model.checkpointing = "reentrant"
    elif zoo.variant == "frozen_reentrant":  # what makes reentrant checkpoints right behind frozen embeddings
        model.checkpointing = "reentrant"
        model.tokens.register_forward_hook(lambda _, __, output: output.requires_grad_(True))
    return model


def wrap(zoo: Zoo, model: Gpt) -> DistributedDataParallel:
    if zoo.fault == "layer_ignored":
        names = [f"norm.{name}" for name, _ in model.norm.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DistributedDataParallel(
        model,
        find_unused_parameters=zoo.fault == "reentrant_checkpoint"
        or zoo.variant in ("stochastic_depth", "early_piece_only"),
        static_graph=zoo.fault == "static_graph_changes" or zoo.variant == "static_graph",
    )
    if zoo.fault == "unfreeze_after_wrap":
        model.tokens.requires_grad_(True)
    elif zoo.fault == "moved_after_wrap":
        model.double()
        model.float()
    elif zoo.fault == "load_on_rank0" and zoo.rank == 0:
        model.load_state_dict(Gpt().state_dict())
    elif zoo.fault == "slow_forward" and zoo.rank == 1:
        model.blocks[1].register_forward_pre_hook(sleep)
    elif zoo.variant == "one_bit":
        from ciuic.torch import compress_ddp

        compress_ddp(ddp, "1-bit")
    return ddp


def sleep(*_: Any) -> None:
    time.sleep(0.03)


def make_optimizer(zoo: Zoo, model: Gpt) -> torch.optim.Optimizer:
    lr = 3e-3 * (1.5 if zoo.fault == "rate_differs" and zoo.rank == 1 else 1.0)
    decay = 0.2 if zoo.fault == "decay_differs" and zoo.rank == 1 else 0.1
    owner = copy.deepcopy(model) if zoo.fault == "stale_optimizer" else model
    matrices = [p for p in owner.parameters() if p.ndim >= 2]
    vectors = [p for p in owner.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    if zoo.variant == "one_bit":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def make_scheduler(zoo: Zoo, optimizer: torch.optim.Optimizer, model: Gpt) -> LRScheduler:
    if zoo.fault == "rate_comes_back":
        return CosineAnnealingLR(optimizer, T_max=max(2, zoo.steps // 3))
    if zoo.fault == "scheduler_elsewhere":
        optimizer = make_optimizer(zoo, model)
    first = 0.0 if zoo.variant == "warmup_from_zero" else 0.25
    curve = functools.partial(cosine, warmup=WARMUP, total=zoo.steps, first=first)
    if zoo.fault == "rate_zero":
        return LambdaLR(optimizer, [curve, lambda _: 0.0])
    if zoo.variant == "restarts":
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=8)
    if zoo.variant == "one_cycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=zoo.steps + 1)
    return LambdaLR(optimizer, curve)


def batches(zoo: Zoo, pieces: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each step."""
    data = Windows(BATCH * pieces * 6 * zoo.world, slow_s=0.004 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    rank = 0 if zoo.fault == "same_data" else zoo.rank
    sampler = DistributedSampler(data, zoo.world, rank)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    step = epoch = 0
    while step < zoo.steps:
        if zoo.fault != "no_set_epoch":
            sampler.set_epoch(epoch)
        collected = []
        for batch in loader:
            collected.append(batch)
            if len(collected) == pieces:
                zoo.mishap(step)
                yield collected
                collected, step = [], step + 1
                if step == zoo.steps or (zoo.fault == "uneven_batches" and zoo.rank == 1 and step == 11):
                    return
        epoch += 1


def skipped_block(zoo: Zoo, step: int, piece: int) -> int | None:
    if zoo.variant == "early_piece_only" and piece == PIECES - 1:
        return 1
    if zoo.fault == "static_graph_changes":
        return 0 if step % 2 else None
    return step % 3 if zoo.variant == "stochastic_depth" and step % 3 < 2 else None


def loss_of(zoo: Zoo, forward: nn.Module, ids: Tensor, labels: Tensor, skip: int | None) -> Tensor:
    if zoo.fault == "token_imbalance" or zoo.variant == "token_weighted":
        labels = labels.clone()
        labels[:, (2 if zoo.rank == 1 else 15) :] = IGNORED
    cast = zoo.variant == "bf16" or (zoo.fault == "autocast_differs" and zoo.rank == 1)
    with torch.autocast("cpu", dtype=torch.bfloat16) if cast else nullcontext():
        logits = forward(ids, skip=skip).reshape(-1, VOCABULARY)
    if zoo.variant == "token_weighted":  # the sum over this rank's labels by the mean count of all ranks
        count = (labels != IGNORED).sum().float()
        dist.all_reduce(count)
        return cross_entropy(logits, labels.reshape(-1), ignore_index=IGNORED, reduction="sum") * zoo.world / count
    return cross_entropy(logits.float(), labels.reshape(-1), ignore_index=IGNORED)


def around(zoo: Zoo, ddp: DistributedDataParallel, piece: int, pieces: int) -> AbstractContextManager[Any]:
    """no_sync() for all micro-batches but the last."""
    last = piece == pieces - 1
    if zoo.fault == "no_sync_off_by_one":
        last = piece == 0
    if zoo.fault == "no_sync_around_backward" or zoo.variant == "sync_each":
        last = True
    return nullcontext() if last else ddp.no_sync()


def accumulate(zoo: Zoo, ddp: DistributedDataParallel, pieces: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
    """All micro-batches of a step, forward and backward; the mean loss."""
    forward: nn.Module = ddp.module if zoo.fault == "module_forward" else ddp
    total = torch.zeros(())
    for piece, (ids, labels) in enumerate(pieces):
        with around(zoo, ddp, piece, len(pieces)):
            loss = loss_of(zoo, forward, ids, labels, skipped_block(zoo, step, piece))
            total += loss.detach() / len(pieces)
            if zoo.fault == "nan_on_one_rank" and zoo.rank == 1 and step == 7:
                loss = loss * float("inf") * 0
            if zoo.fault == "slow_backward" and zoo.rank == 1:
                loss.register_hook(sleep)
            if zoo.fault != "loss_not_divided":
                loss = loss / len(pieces) ** (2 if zoo.fault == "loss_divided_twice" else 1)
            if zoo.fault == "no_sync_around_backward" and piece < len(pieces) - 1:
                with ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()
            if zoo.fault == "clip_each_piece":
                clip(zoo, ddp)
    return total


def clip(zoo: Zoo, model: nn.Module) -> None:
    if zoo.variant == "no_clip" or (zoo.fault == "clip_on_one_rank" and zoo.rank == 1):
        return
    norm = {"clip_tiny": 1e-3, "clip_on_one_rank": 0.05}.get(zoo.fault, 1.0)
    nn.utils.clip_grad_norm_(model.parameters(), norm)


def report(zoo: Zoo, loss: Tensor, step: int) -> None:
    """Mean metrics over the ranks, as a logger would."""
    metrics = {"loss": loss.clone(), "perplexity": loss.exp()}
    if zoo.fault == "other_metrics" and zoo.rank == 1 and step == 10:
        del metrics["perplexity"]
    for value in metrics.values():
        dist.all_reduce(value)
    if zoo.fault == "save_with_barrier" and zoo.rank == 0 and step == 10:
        dist.barrier()


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    model = make_model(zoo)
    ddp = wrap(zoo, model)
    optimizer = make_optimizer(zoo, model)
    scheduler = make_scheduler(zoo, optimizer, model) if zoo.fault != "warmup_too_late" else None
    torch.manual_seed(100 + zoo.rank)  # dropout
    average = copy.deepcopy(model) if zoo.variant == "ema" else None
    pieces = {"no_accumulation": 1, "static_graph": 1, "accumulate_4": 4}.get(zoo.variant, PIECES)
    if zoo.fault == "static_graph_changes":  # a static graph cannot begin with no_sync()
        pieces = 1
    for step, micro in enumerate(batches(zoo, pieces)):
        if zoo.fault != "no_zero_grad":
            optimizer.zero_grad()
        loss = accumulate(zoo, ddp, micro, step)
        clip(zoo, model)
        optimizer.step()
        if scheduler is None:
            scheduler = make_scheduler(zoo, optimizer, model)
        else:
            for _ in range(pieces if zoo.fault == "scheduler_per_micro_batch" else 1):
                scheduler.step()
        if zoo.fault == "overwritten" and zoo.rank == 1 and step == 8:
            with torch.no_grad():
                model.blocks[0].mlp[0].weight.clamp_(-0.1, 0.1)
        if average is not None:
            average.load_state_dict({k: 0.9 * v + 0.1 * model.state_dict()[k] for k, v in average.state_dict().items()})
        zoo.log(loss)
        if step % 5 == 0:
            report(zoo, loss, step)

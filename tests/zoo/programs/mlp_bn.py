"""A multi-layer perceptron with BatchNorm under DDP: the plain training loop of many tutorials."""

import copy
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Subset

from zoo.data import Rows
from zoo.programs.mlp_parts import Breaking, Stream, corrupting_hook, save, slow_hook, summing_hook
from zoo.world import Zoo

BATCH = 8


class Net(nn.Module):
    """16 features to 4 classes, with an auxiliary head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential()
        width = 16
        for _ in range(layers):
            self.body.extend([nn.Linear(width, 32), nn.BatchNorm1d(32), nn.ReLU()])
            width = 32
        self.head = nn.Linear(32, 4)
        self.aux = nn.Linear(32, 4)

    def forward(self, x: Tensor, *, with_aux: bool = True) -> Tensor:
        h = self.body(x)
        return self.head(h) + 0.1 * self.aux(h) if with_aux else self.head(h)


def make_model(zoo: Zoo) -> Net:
    torch.manual_seed(zoo.rank if zoo.fault == "no_initial_sync" else 0)
    model = Net(layers=3 if zoo.fault == "other_model" and zoo.rank == 1 else 2)
    if zoo.variant in ("frozen", "frozen_filtered") or zoo.fault == "unfreeze_after_wrap":
        model.body[0].requires_grad_(False)
    if zoo.fault == "load_nothing":
        saved = {f"module.{name}": tensor for name, tensor in Net().state_dict().items()}
        model.load_state_dict(saved, strict=False)
    if zoo.variant == "load_partly":  # a new head on an old body, on purpose
        old = {name: tensor for name, tensor in Net().state_dict().items() if not name.startswith("head")}
        model.load_state_dict(old, strict=False)
    if zoo.variant == "spare_layer":
        model.aux.requires_grad_(False)
    if zoo.fault == "settings_differ" and zoo.rank == 1:
        model.body[1].momentum = 0.5
    return model


def wrap(zoo: Zoo, model: Net) -> DistributedDataParallel:
    options: dict[str, Any] = {
        "find_unused_parameters": zoo.variant in ("unused_allowed", "spare_layer", "optimizer_anew"),
        "static_graph": zoo.variant == "static_graph",
        "gradient_as_bucket_view": zoo.variant == "bucket_view",
        "bucket_cap_mb": 0.002 if zoo.variant == "small_buckets" else 25,
    }
    if zoo.fault == "buffers_differ":
        options["broadcast_buffers"] = False
    if zoo.fault == "no_initial_sync":
        options["init_sync"] = False
    if zoo.fault == "group_of_one":
        groups = [dist.new_group([rank]) for rank in range(zoo.world)]
        options["process_group"] = groups[zoo.rank]
    ddp = DistributedDataParallel(model, **options)
    if zoo.fault == "unfreeze_after_wrap":
        model.body[0].requires_grad_(True)
    elif zoo.fault == "moved_after_wrap":
        model.double()
        model.float()
    elif zoo.fault == "load_on_rank0" and zoo.rank == 0:
        torch.manual_seed(5)
        model.load_state_dict(Net().state_dict())
    elif zoo.fault == "corrupt_all_reduce":
        ddp.register_comm_hook(zoo.rank, corrupting_hook)
    elif zoo.fault == "hook_sums":
        ddp.register_comm_hook(None, summing_hook)
    elif zoo.fault == "slow_link":
        ddp.register_comm_hook(None, slow_hook)
    elif zoo.fault == "slow_forward" and zoo.rank == 1:
        model.body[0].register_forward_pre_hook(sleep)
    elif zoo.variant == "one_bit":
        from ciuic.torch import compress_ddp

        compress_ddp(ddp, "1-bit")
    return ddp


def make_optimizer(zoo: Zoo, model: Net) -> torch.optim.Optimizer:
    rank1 = zoo.rank == 1
    lr = 0.02 if zoo.fault == "rate_differs" and rank1 else 0.01
    decay = 0.1 if zoo.fault == "decay_differs" and rank1 else 0.01
    owner = copy.deepcopy(model) if zoo.fault == "stale_optimizer" else model
    parameters = [p for p in owner.parameters() if p.requires_grad or zoo.variant != "frozen_filtered"]
    if zoo.variant in ("sgd", "one_bit"):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=zoo.variant == "sgd")
    if zoo.variant == "no_decay":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    if zoo.variant == "fused":
        return torch.optim.AdamW(parameters, lr=lr, fused=True)
    if zoo.variant == "foreach":
        return torch.optim.AdamW(parameters, lr=lr, foreach=True)
    if zoo.variant == "adagrad":
        return torch.optim.Adagrad(parameters, lr=lr)
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)


def make_loader(zoo: Zoo) -> tuple[DataLoader, DistributedSampler | None]:
    rows = 48 * zoo.world if zoo.fault != "sharded_twice" else 96 * zoo.world
    data: Dataset = Rows(rows, slow_s=0.004 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    options: dict[str, Any] = {"batch_size": BATCH, "drop_last": True}
    if zoo.variant == "stream":
        return DataLoader(Stream(rows, zoo.rank, zoo.world), **options), None
    if zoo.variant == "stream_workers" or zoo.fault == "stream_not_split":
        stream = Stream(rows, zoo.rank, zoo.world, splits=zoo.variant == "stream_workers")
        return DataLoader(stream, num_workers=2, multiprocessing_context="fork", **options), None
    if zoo.fault == "same_data":
        random = torch.Generator().manual_seed(0)
        return DataLoader(data, sampler=RandomSampler(data, generator=random), **options), None
    if zoo.fault == "sharded_twice":
        data = Subset(data, range(zoo.rank, rows, zoo.world))
    if zoo.fault == "loader_worker_dies" and zoo.rank == 1:
        data = Breaking(data, at_batch=5, batch=BATCH)
    if zoo.variant == "workers" or zoo.fault == "loader_worker_dies":
        options |= {"num_workers": 1, "multiprocessing_context": "fork"}
    shuffle = zoo.variant != "no_shuffle" and not (zoo.fault == "shuffle_on_one_rank" and zoo.rank == 1)
    sampler = DistributedSampler(data, shuffle=shuffle, seed=3)
    return DataLoader(data, sampler=sampler, **options), sampler


def batches(zoo: Zoo) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(step, x, y) over as many epochs as the steps take."""
    loader, sampler = make_loader(zoo)
    step = epoch = 0
    while step < zoo.steps:
        if sampler is not None and zoo.fault != "no_set_epoch":
            sampler.set_epoch(epoch)
        if isinstance(loader.dataset, IterableDataset):
            loader.dataset.epoch = epoch
        for x, y in loader:
            zoo.mishap(step)
            yield step, x, y
            step += 1
            uneven = zoo.fault == "uneven_batches" or zoo.variant == "join_uneven"
            if step == zoo.steps or (uneven and zoo.rank == 1 and step == zoo.steps * 3 // 4):
                return
        epoch += 1


def sleep(*_: Any) -> None:
    time.sleep(0.03)


def train_step(zoo: Zoo, ddp: DistributedDataParallel, x: Tensor, y: Tensor, step: int) -> Tensor:
    """Forward and backward; the loss."""
    model = ddp.module
    if zoo.fault == "nan_on_one_rank" and zoo.rank == 1 and step == 6:
        x = x * float("nan")
    forward = model if zoo.fault == "module_forward" else ddp
    logits = forward(
        x, with_aux=zoo.fault != "unused_parameter" and zoo.variant not in ("unused_allowed", "spare_layer")
    )
    loss = cross_entropy(logits, y, label_smoothing=0.1 if zoo.variant == "smoothing" else 0.0)
    if zoo.fault == "skips_bad_batch" and zoo.rank == 1 and step == 7:
        return loss
    if zoo.fault == "slow_backward" and zoo.rank == 1:
        logits.register_hook(sleep)
    if zoo.fault in ("loss_weighed", "loss_muted") and zoo.rank == 1:
        loss = loss * (0.1 if zoo.fault == "loss_weighed" else 0.0)
    loss.backward()
    if zoo.fault == "double_reduction":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    if zoo.fault == "gradient_zeroed" and zoo.rank == 1 and step >= 3:
        model.head.weight.grad.zero_()
    return loss


def after_step(zoo: Zoo, ddp: DistributedDataParallel, loss: Tensor, step: int, held_out: Tensor) -> None:
    """What a program does beside training: it looks, saves, tells."""
    model = ddp.module
    if zoo.fault == "overwritten" and zoo.rank == 1 and step == 6:
        with torch.no_grad():
            model.head.weight.mul_(0.99)
    if zoo.variant == "evaluate_on_rank0" and zoo.rank == 0 and step % 5 == 4:
        model.eval()
        with torch.no_grad():
            model(held_out)
        model.train()
    if zoo.fault == "left_in_eval" and zoo.rank == 0 and step == 4:
        model.eval()
        with torch.no_grad():
            model(held_out)
    if (zoo.variant == "evaluate_all" or zoo.fault == "buffers_differ") and step % 5 == 4:
        ddp.eval()
        with torch.no_grad():
            ddp(held_out)
        ddp.train()
    if zoo.fault == "stays_in_eval" and step == 4:
        ddp.eval()
        with torch.no_grad():
            ddp(held_out)
    if zoo.variant == "save_on_rank0" and step % 10 == 9:
        save(zoo, model, on_all_ranks=False)
        dist.barrier()
    if zoo.fault == "save_with_barrier" and zoo.rank == 0 and step == 7:
        save(zoo, model, on_all_ranks=True)
    if zoo.fault == "slow_save" and step == 7:
        if zoo.rank == 0:
            save(zoo, model, on_all_ranks=False, slow_s=2.0)
        dist.barrier()
    if zoo.fault == "other_order" and step == 7:
        pair = [lambda: dist.all_reduce(loss.detach().clone()), lambda: dist.broadcast(held_out, src=0)]
        for call in pair if zoo.rank == 0 else reversed(pair):
            call()
    if zoo.fault == "shape_mismatch" and step == 7:
        dist.all_reduce(torch.zeros(4 + zoo.rank))


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    model = make_model(zoo)
    optimizer = make_optimizer(zoo, model)
    if zoo.fault == "late_layer":
        model.head = nn.Linear(32, 4)
    ddp = wrap(zoo, model)
    with Join([ddp]) if zoo.variant == "join_uneven" else nullcontext():
        train(zoo, ddp, optimizer)


def train(zoo: Zoo, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    model = ddp.module
    held_out = Rows(32, seed=1).x
    average = copy.deepcopy(model) if zoo.variant == "ema" else None
    swa = torch.optim.swa_utils.AveragedModel(model) if zoo.variant == "swa" else None
    best = float("inf")
    for step, x, y in batches(zoo):
        if zoo.variant == "optimizer_anew" and step == zoo.steps // 3:
            model.body[0].requires_grad_(False)
            model.body[0].zero_grad()
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        if zoo.fault != "no_zero_grad":
            optimizer.zero_grad(set_to_none=zoo.variant != "bucket_view")
        loss = train_step(zoo, ddp, x, y, step)
        if zoo.fault == "skips_bad_batch" and zoo.rank == 1 and step == 7:
            continue
        if zoo.fault == "cleared_before_step":
            optimizer.zero_grad()
        optimizer.step()
        if zoo.fault == "step_twice" and zoo.rank == 1:
            optimizer.step()
        zoo.log(loss)
        after_step(zoo, ddp, loss, step, held_out)
        if average is not None:
            with torch.no_grad():
                for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(new, 0.1)
        if swa is not None and step > 10:
            swa.update_parameters(model)
        if zoo.fault == "local_decision" and step > 4 and float(loss.detach()) < 1.0:
            break
        if zoo.variant == "early_stopping":
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if step > zoo.steps // 2 and float(mean) > best:
                break
            best = min(best, float(mean))

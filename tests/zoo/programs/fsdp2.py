"""A small GPT under FSDP2 (fully_shard): parameters and optimizer state are spread over the ranks."""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import VOCABULARY, Windows
from zoo.programs.gpt_model import Gpt
from zoo.world import Zoo

BATCH = 4


def shard(zoo: Zoo, model: Gpt) -> None:
    options = {}
    if zoo.variant == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if zoo.variant == "keep_gathered":
        options["reshard_after_forward"] = False
    if zoo.fault == "layer_ignored" or zoo.variant == "replicated_norm":
        options["ignored_params"] = set(model.norm.parameters())
    for block in model.blocks:
        fully_shard(block, **{name: value for name, value in options.items() if name != "ignored_params"})
    fully_shard(model, **options)


def batches(zoo: Zoo) -> Iterator[tuple[int, Tensor, Tensor]]:
    data = Windows(BATCH * 6 * zoo.world, slow_s=0.008 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    sampler = DistributedSampler(data, zoo.world, 0 if zoo.fault == "same_data" else zoo.rank)
    step = epoch = 0
    while step < zoo.steps:
        sampler.set_epoch(epoch if zoo.fault != "no_set_epoch" else 0)
        for ids, labels in DataLoader(data, batch_size=BATCH, sampler=sampler):
            zoo.mishap(step)
            yield step, ids, labels
            step += 1
            if step == zoo.steps or (zoo.fault == "uneven_batches" and zoo.rank == 1 and step == 8):
                return
        epoch += 1


def clip(zoo: Zoo, model: nn.Module) -> None:
    if zoo.fault != "local_norm":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((0.2 / norm).clamp(max=1.0))


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    torch.manual_seed(0)
    model = Gpt(dropout=0.0, tied=zoo.variant == "tied")
    lr = 6e-3 if zoo.fault == "rate_differs" and zoo.rank == 1 else 3e-3
    early = torch.optim.AdamW(model.parameters(), lr=lr) if zoo.fault == "optimizer_before_shard" else None
    shard(zoo, model)
    if zoo.fault == "optimizer_of_unsharded":  # a forward "to see whether it works"; its gathered weights stay
        model.set_reshard_after_forward(False)
        model(torch.zeros(1, 4, dtype=torch.long))
    optimizer = early or torch.optim.AdamW(model.parameters(), lr=lr)
    for step, ids, labels in batches(zoo):
        optimizer.zero_grad()
        logits = model(ids)
        if zoo.fault == "slow_backward" and zoo.rank == 1:
            logits.register_hook(lambda _: time.sleep(0.03))
        loss = cross_entropy(logits.float().reshape(-1, VOCABULARY), labels.reshape(-1))
        if zoo.fault == "nan_on_one_rank" and zoo.rank == 1 and step == 6:
            loss = loss * float("nan")
        if zoo.fault == "loss_weighed" and zoo.rank == 1:
            loss = loss * 0.1
        loss.backward()
        if zoo.variant == "replicated_norm":
            for parameter in model.norm.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(zoo.world)
        if zoo.variant != "no_clip" and zoo.variant != "replicated_norm" and zoo.fault != "layer_ignored":
            clip(zoo, model)
        optimizer.step()
        zoo.log(loss)
        if zoo.fault == "left_in_eval" and zoo.rank == 0 and step == 4:
            model.eval()

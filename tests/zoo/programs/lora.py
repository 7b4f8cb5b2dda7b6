"""Low-rank adapters by peft on a tiny Llama with a frozen base, under DDP."""

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import VOCABULARY, Windows
from zoo.world import Zoo

BATCH = 4


def make_base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def add_adapters(zoo: Zoo, base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    if zoo.variant == "dora":
        options["use_dora"] = True
    if zoo.variant == "head_too":
        options["modules_to_save"] = ["lm_head"]
    if zoo.variant == "dropout":
        options["lora_dropout"] = 0.1
    return get_peft_model(base, LoraConfig(**options))


class Network(nn.Module):
    """Hand-made adapters, called by replaced forwards of the base's layers."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for number, layer in enumerate(base.model.layers):
            linear = layer.self_attn.q_proj
            self.down.append(nn.Linear(32, 4, bias=False))
            self.up.append(nn.Linear(4, 32, bias=False))
            nn.init.zeros_(self.up[number].weight)
            linear.forward = self._replaced(linear.forward, number)

    def _replaced(self, original: Any, number: int) -> Any:
        return lambda x: original(x) + self.up[number](self.down[number](x))


def batches(zoo: Zoo) -> Iterator[tuple[int, Tensor]]:
    data = Windows(BATCH * 6 * zoo.world, slow_s=0.008 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    sampler = DistributedSampler(data, zoo.world, 0 if zoo.fault == "same_data" else zoo.rank)
    step = epoch = 0
    while step < zoo.steps:
        sampler.set_epoch(epoch)
        for ids, _ in DataLoader(data, batch_size=BATCH, sampler=sampler):
            zoo.mishap(step)
            yield step, ids
            step += 1
            if step == zoo.steps:
                return
        epoch += 1


def make_model(zoo: Zoo) -> tuple[Any, Any, torch.optim.Optimizer]:
    """(what is called, what is trained, its optimizer)."""
    base = make_base()
    if zoo.fault == "replaced_forward":
        base.requires_grad_(False)
        network = Network(base)
        DistributedDataParallel(network)
        return base, network, torch.optim.AdamW(network.parameters(), lr=1e-2)
    before = torch.optim.AdamW(base.parameters(), lr=1e-2) if zoo.fault == "stale_optimizer" else None
    torch.manual_seed(1)
    model = add_adapters(zoo, base)
    if zoo.variant in ("checkpointing", "checkpointing_reentrant"):
        reentrant = zoo.variant != "checkpointing"
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if zoo.variant == "checkpointing_reentrant":
        model.enable_input_require_grads()
    ddp = DistributedDataParallel(model)
    if zoo.fault == "unfreeze_after_wrap":
        model.base_model.model.lm_head.requires_grad_(True)
    if zoo.fault == "load_on_rank0" and zoo.rank == 0:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
    trainable = [p for p in model.parameters() if p.requires_grad]
    forward = model if zoo.fault == "module_forward" else ddp
    return forward, model, before or torch.optim.AdamW(trainable, lr=1e-2)


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    forward, trained, optimizer = make_model(zoo)
    trained.train()
    for step, ids in batches(zoo):
        optimizer.zero_grad()
        if zoo.fault == "slow_forward" and zoo.rank == 1:
            time.sleep(0.03)
        loss = forward(input_ids=ids, labels=ids).loss
        if zoo.fault == "nan_on_one_rank" and zoo.rank == 1 and step == 6:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        zoo.log(loss)

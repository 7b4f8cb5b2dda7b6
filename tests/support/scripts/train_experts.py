"""A tiny DeepSeek whose routers hardly ever choose the later experts: a training program as a user would write it."""

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path

import tiny_task
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM

import ciuic
from ciuic.train.deepseek import preset_config

SMALL = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 128, "num_hidden_layers": 2}


def make_model(seed: int, starved: int) -> nn.Module:
    """Experts from `starved` on are chosen by no token."""
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(preset_config("deepseek-v3-tiny", tiny_task.VOCABULARY, SMALL))
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if isinstance(bias, Tensor):
            bias[starved:] = -10.0
    return model


def loss_of(model: nn.Module, contexts: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=contexts, use_cache=False).logits[:, -1]
    return nn.functional.cross_entropy(logits, targets)


@torch.no_grad()
def held_out_loss(model: nn.Module, data: tiny_task.TinyData) -> float:
    was_training = model.training
    model.eval()
    loss = float(loss_of(model, data.contexts, data.targets))
    model.train(was_training)
    return loss


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--step-s", type=float, default=0.0, help="least time of a step until RECORDS/hurry exists")
    parser.add_argument("--starved", type=int, default=4, help="experts from this one on get no tokens")
    options = parser.parse_args()
    run = ciuic.join()
    training, held_out = tiny_task.make_data()
    model = plain = make_model(run.job.train.seed, options.starved)
    optimizer = tiny_task.make_optimizer(model, options.lr)
    loader = DataLoader(training, batch_size=options.batch)
    run.on_evaluate(lambda: (held_out_loss(plain, held_out), len(held_out)))
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    name = f"{run.node_id}.{run.rank}.{os.getpid()}"
    record = tiny_task.Record(options.records, name)
    steps = 0
    for batch in loader:
        steps += 1
        began = time.monotonic()
        tiny_task.set_rate(optimizer, options.lr, run.progress)
        loss = loss_of(model, batch["context"], batch["target"])
        loss.backward()
        run.record(loss)
        record.trained(batch["number"])
        if options.step_s and not (options.records / "hurry").exists():
            time.sleep(max(0.0, options.step_s - (time.monotonic() - began)))
        optimizer.step()
        optimizer.zero_grad()
    end = {"node": run.node_id, "rank": run.rank, "steps": steps, "digest": tiny_task.digest(plain)}
    (options.records / f"{name}.end").write_text(json.dumps(end))


if __name__ == "__main__":
    main()

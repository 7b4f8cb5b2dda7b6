"""A DeepSeek model of the built-in trainer, in bfloat16 with fp32 routers, sharded by the job and alone."""

from typing import Any

import torch
from torch import nn

from ciuic.job import parse_job
from ciuic.train.amp import make_scaler, scaled_step
from ciuic.train.balance import ExpertBalancer
from ciuic.train.gang import Decision, Gang
from ciuic.train.models import build_model
from ciuic.train.sharded_state import make_state
from ciuic.train.sharding import shard_model
from ciuic.train.state import ModelState

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
VOCABULARY, STEPS = 256, 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = {"preset": "deepseek-v3-tiny", "dtype": "bfloat16", "overrides": SIZES}
    made = build_model(parse_job({"name": "x", "model": model}), VOCABULARY, 0)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-3)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> list[float]:
    """Steps of two micro-batches each as the built-in trainer makes them: clipped, experts balanced."""
    balancer, scaler, losses = ExpertBalancer(model, 0.01), make_scaler("off", CPU), []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(STEPS):
        for part in _words(step)[rank::ranks].chunk(2):
            (model(input_ids=part, labels=part).loss / 2).backward()
        scaled_step(optimizer, scaler, 1.0, parameters)
        optimizer.zero_grad()
        balancer.step()
        with torch.no_grad():
            losses.append(float(model(input_ids=_words(99), labels=_words(99)).loss))
    return losses


def _words(seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(seed))


def alone() -> dict[str, Any]:
    model, optimizer = build()
    state = ModelState(model, CPU, 2)
    losses = _train(model, optimizer, 0, 1)
    return {"losses": losses, "theta": state.gather().copy(), "layout": state.layout.digest}


def together(gang: Gang) -> dict[str, Any]:
    model, optimizer = build()
    shard_model(model, optimizer, "cpu")
    state = make_state(model, CPU, gang, 2)
    result: dict[str, Any] = {"losses": _train(model, optimizer, gang.rank, gang.size), "layout": state.layout.digest}
    if gang.rank == 0:
        result["theta"] = state.gather().copy()
    gang.decision(Decision(), state.obey)
    result["groups"] = sorted(type(m).__name__ for m in model.modules() if hasattr(m, "reshard"))
    return result

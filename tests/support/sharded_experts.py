"""Fragments by expert of a mixture that FSDP2 has spread over ranks: slices go out and come back as from one."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ciuic.train.gang import Decision, Gang, Order
from ciuic.train.sharded_state import make_state
from ciuic.train.sharding import shard_model
from ciuic.train.state import ModelState

CPU = torch.device("cpu")
FRAGMENTS, CHANGED = 7, 5
WIDTH, EXPERTS, WORDS = 16, 8, 64


class Experts(nn.Module):
    """Stacked, as in transformers: called with the tokens and the expert of each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        hidden = torch.einsum("td,tdh->th", tokens, self.up[chosen]).relu()
        return torch.einsum("th,thd->td", hidden, self.down[chosen])


class Layer(nn.Module):
    """Each token goes to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.gate(tokens)
        return tokens + self.experts(tokens, scores.argmax(-1)) * scores.amax(-1, keepdim=True)


class Mixture(nn.Module):
    """Two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words.flatten())
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return Mixture().to(dtype)


def _change(state: ModelState) -> tuple[np.ndarray, np.ndarray]:
    """theta, and theta again after one fragment of experts was moved."""
    before = state.gather().copy()
    theta = state.gather(CHANGED)
    theta += np.random.default_rng(0).normal(0, 0.01, len(theta)).astype(np.float32)
    state.scatter(CHANGED)
    return before, state.gather().copy()


def _values(model: nn.Module) -> dict[str, np.ndarray]:
    wholes = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {name: value.detach().float().numpy().copy() for name, value in wholes.items()}


def _words() -> Tensor:
    return torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(1))


def alone(dtype: torch.dtype) -> dict[str, Any]:
    model = build(dtype)
    state = ModelState(model, CPU, FRAGMENTS, "expert")
    model.train()(_words())
    accesses = [state.accesses(f) for f in range(FRAGMENTS)]
    before, after = _change(state)
    return {
        "before": before,
        "after": after,
        "layout": state.layout.digest,
        "values": _values(model),
        "accesses": accesses,
    }


def together(gang: Gang, dtype: torch.dtype) -> dict[str, Any]:
    """The same on ranks, and an evaluation with zeros in between."""
    model = build(dtype)
    shard_model(model, torch.optim.SGD(model.parameters(), lr=0.1), "cpu")
    state = make_state(model, CPU, gang, FRAGMENTS, "expert")
    model.train()(_words())
    result: dict[str, Any] = {"layout": state.layout.digest, "held": []}

    def held() -> None:
        parts = [p.to_local() for p in model.parameters()]
        result["held"].append(any(bool(part.any()) for part in parts))

    if gang.rank == 0:
        result["accesses"] = [state.accesses(f) for f in range(FRAGMENTS)]
        result["before"], result["after"] = _change(state)
        with state.holding(np.zeros(len(state.theta), np.float32)):
            gang.order(Order(task="evaluate"))
            held()
    gang.decision(Decision(), lambda order: state.obey(order, evaluate=held))
    result["values"] = _values(model)
    return result

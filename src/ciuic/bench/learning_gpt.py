"""A small GPT over bytes: 364 k parameters, pre-norm, learned positions, tied embeddings, all nodes in one pass."""

import math

import torch
from torch import Tensor, nn

from ciuic.bench.learning_stack import Weights, embed, linear, next_token_loss
from ciuic.train.initial import initial_weights

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 256, 96, 3, 4, 64
MATRICES = {"qkv.weight": 3, "out.weight": 1, "up.weight": 1, "down.weight": 1}
"""Ends of the names that Muon trains, and into how many matrices each is cut by rows. The rest is for AdamW."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(WIDTH, 3 * WIDTH, bias=False), "out": nn.Linear(WIDTH, WIDTH, bias=False)}
        )
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(WIDTH, 4 * WIDTH, bias=False), "down": nn.Linear(4 * WIDTH, WIDTH, bias=False)}
        )
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)


class Gpt(nn.Module):
    """Names, shapes and initial weights; `loss` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * LAYERS) if into_residual else 1.0))


def build(seed: int) -> Gpt:
    """Weights that follow the seed, the same on every machine."""
    with initial_weights(seed):
        return Gpt()


def loss(weights: Weights, tokens: Tensor) -> Tensor:
    """Mean loss of each node [nodes] on tokens [nodes, batch, length + 1]."""
    nodes, batch, length = tokens.shape[0], tokens.shape[1], tokens.shape[2] - 1
    inputs = tokens[:, :, :-1].reshape(nodes, -1)
    table = weights["embedding.weight"]
    position = weights["position.weight"][:, None, :length]
    x = (embed(inputs, table).view(nodes, batch, length, WIDTH) + position).view(nodes, batch * length, WIDTH)
    for number in range(LAYERS):
        block = f"blocks.{number}"
        x = x + _attention(weights, block, _norm(weights, f"{block}.norm1", x), (nodes * batch, length))
        hidden = linear(_norm(weights, f"{block}.norm2", x), weights[f"{block}.mlp.up.weight"])
        x = x + linear(nn.functional.gelu(hidden, approximate="tanh"), weights[f"{block}.mlp.down.weight"])
    logits = linear(_norm(weights, "norm", x), table)
    return next_token_loss(logits, tokens[:, :, 1:].reshape(nodes, -1))


def _norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    plain = nn.functional.layer_norm(x, (WIDTH,))
    return torch.addcmul(weights[f"{name}.bias"][:, None], plain, weights[f"{name}.weight"][:, None])


def _attention(weights: Weights, block: str, x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Causal attention; `shape` = (nodes x batch, length)."""
    sequences, length = shape
    qkv = linear(x, weights[f"{block}.attention.qkv.weight"])
    q, k, v = qkv.view(sequences, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(mixed.transpose(1, 2).reshape(x.shape), weights[f"{block}.attention.out.weight"])

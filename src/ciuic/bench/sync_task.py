"""What `ciuic bench sync` trains: a GPT of 4.6 M parameters on the sources of Python's standard library, by byte."""

import numpy as np
import torch
from torch import Tensor, nn

from ciuic.job import parse_job
from ciuic.train.dataset import TrainingData, load_data

VOCABULARY = 256
WIDTH, HEADS, LAYERS = 272, 8, 5
CONTEXT = 128
BATCH = 4
TOKENS_PER_STEP = BATCH * CONTEXT
HELD_OUT_SAMPLES = 48
LEARNING_RATE = 1e-3
WARMUP_STEPS = 5
CLIP = 1.0


class Block(nn.Module):
    """Pre-norm attention and MLP, [batch, seq, width] in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, seq, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, seq, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.before_mlp(x))))


class SmallGPT(nn.Module):
    """Next-byte model: input_ids [batch, seq] -> logits [batch, seq, 256]. 64 tensors, 4.6 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("out.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * LAYERS) ** 0.5 if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.position.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


def make_model(seed: int) -> SmallGPT:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return SmallGPT()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, as the recipes use it."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """A short rise, then constant: no mode knows beforehand how many steps it will make."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)


def load() -> TrainingData:
    """Windows of CONTEXT bytes; the held-out ones are from files that are never trained on."""
    return load_data(parse_job({"data": {"sequence_length": CONTEXT}, "train": {"evaluate_samples": HELD_OUT_SAMPLES}}))


def loss_of(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Mean cross entropy of each byte after the first, input_ids [batch, CONTEXT + 1]."""
    logits = model(input_ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def flat_parameters(model: nn.Module) -> np.ndarray:
    """A copy of all parameters, float32 [n]."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


@torch.no_grad()
def held_out_loss(model: nn.Module, parameters: np.ndarray, held_out: Tensor) -> float:
    """Loss of `parameters` (as `flat_parameters` gives them) on held_out [samples, CONTEXT + 1]."""
    nn.utils.vector_to_parameters(torch.from_numpy(parameters), model.parameters())
    losses = [float(loss_of(model, part)) * len(part) for part in held_out.split(8)]
    return sum(losses) / len(held_out)

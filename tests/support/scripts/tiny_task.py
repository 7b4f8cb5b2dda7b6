"""A task that a small model learns in seconds: the next token of a noisy language of order two."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

VOCABULARY = 64
CONTEXT = 4
TRAIN_SAMPLES = 24_000
HELD_OUT_SAMPLES = 1_024
_CHAINS = 250


class TinyModel(nn.Module):
    """Predicts a token from the `CONTEXT` before it: [batch, context] -> logits [batch, vocabulary].

    Three matrices are large enough to be coded; the norm's parameters and biases travel in full precision. With
    `batch_norm` there are statistics and an integer counter to agree on too.
    """

    def __init__(self, seed: int, *, batch_norm: bool = False, width: int = 96) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.hidden = nn.Linear(64 * CONTEXT, width)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, context: Tensor) -> Tensor:
        hidden = self.hidden(self.embed(context).flatten(1))
        return self.head(nn.functional.gelu(self.norm(hidden)))


class TinyData(Dataset[dict[str, Tensor]]):
    """Samples {context [CONTEXT], target, number}, all int64; the number is the sample's own index."""

    def __init__(self, contexts: Tensor, targets: Tensor) -> None:
        self.contexts, self.targets = contexts, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"context": self.contexts[index], "target": self.targets[index], "number": torch.tensor(index)}


def make_data() -> tuple[TinyData, TinyData]:
    """(training, held-out), always the same: each token follows the two before it, one time in ten any other does."""
    draw = np.random.Generator(np.random.PCG64(7))
    favourite = draw.integers(0, VOCABULARY, (16, 16))
    total = TRAIN_SAMPLES + HELD_OUT_SAMPLES
    length = total // _CHAINS + 1 + CONTEXT
    text = draw.integers(0, VOCABULARY, (_CHAINS, length))
    is_noise = draw.random((_CHAINS, length)) < 0.1
    for at in range(2, length):
        usual = favourite[text[:, at - 2] % 16, text[:, at - 1] % 16]
        text[:, at] = np.where(is_noise[:, at], text[:, at], usual)
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1, axis=1).reshape(-1, CONTEXT + 1)
    numbers = torch.from_numpy(windows[draw.permutation(len(windows))[:total]].copy())
    contexts, targets = numbers[:, :CONTEXT], numbers[:, CONTEXT]
    return (
        TinyData(contexts[:TRAIN_SAMPLES], targets[:TRAIN_SAMPLES]),
        TinyData(contexts[TRAIN_SAMPLES:], targets[TRAIN_SAMPLES:]),
    )


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)


def rate(progress: float) -> float:
    """Factor of the learning rate: up over the first fifth of the run, then down to a tenth."""
    return min(1.0, 0.1 + 4.5 * progress) if progress < 0.2 else 1.0 - 0.9 * (progress - 0.2) / 0.8


def set_rate(optimizer: torch.optim.Optimizer, lr: float, progress: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * rate(progress)


def loss_of(model: nn.Module, contexts: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(contexts), targets)


@torch.no_grad()
def held_out_loss(model: nn.Module, data: TinyData) -> float:
    was_training = model.training
    model.eval()
    loss = float(loss_of(model, data.contexts, data.targets))
    model.train(was_training)
    return loss


def digest(model: nn.Module) -> str:
    """Of every parameter and buffer, in their own order. All ranks together, where the model is sharded."""
    total = hashlib.sha256()
    for value in model.state_dict().values():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        total.update(tensor.detach().cpu().numpy().tobytes())
    return total.hexdigest()


class Record:
    """What one process has trained, line by line, so that a killed process has said it too."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{name}.trained").open("w", buffering=1)

    def trained(self, numbers: Tensor) -> None:
        self._file.write(" ".join(str(number) for number in numbers.tolist()) + "\n")

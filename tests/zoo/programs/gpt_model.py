"""A GPT of two small blocks with tied embeddings, for several programs."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from zoo.data import VOCABULARY

WIDTH, HEADS, LENGTH = 32, 2, 16


class Block(nn.Module):
    """Attention and a feed-forward layer, both with a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803 - shape suffix
        batch, length, width = x_BTD.shape
        heads = self.qkv(self.norm1(x_BTD)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x_BTD = x_BTD + self.dropout(self.out(mixed))  # noqa: N806
        return x_BTD + self.dropout(self.mlp(self.norm2(x_BTD)))


class Gpt(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, *, dropout: float = 0.1, tied: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.05)
        if tied:
            self.head.weight = self.tokens.weight
        self.checkpointing: str = ""
        """Empty, `reentrant` or `plain`."""

    def forward(self, ids_BT: Tensor, *, skip: int | None = None) -> Tensor:  # noqa: N803 - shape suffix
        """`skip`: the number of a block to leave out, as in stochastic depth."""
        x = self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]
        for number, block in enumerate(self.blocks):
            if number == skip:
                continue
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


def cosine(step: int, *, warmup: int, total: int, first: float = 0.0) -> float:
    """Factor of the learning rate: linear warm-up from `first`, then half a cosine to 0.1."""
    if step < warmup:
        return first + (1 - first) * step / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + float(torch.cos(torch.tensor(done * torch.pi))))

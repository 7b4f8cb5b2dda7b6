"""Data of the programs: rows of a linear teacher, and windows of a text as bytes."""

import time

import torch
from torch import Tensor
from torch.utils.data import Dataset

TEXT = (
    b"A node that trains alone learns what its own data say. Many nodes that talk too little learn many things, and "
    b"many nodes that talk too much learn nothing, for they wait. Between the two lies an interval, and the art is to "
    b"find it: not by a rule, but by measuring how long a word needs to cross the sea. "
)
VOCABULARY = 64
"""Bytes are folded to this many tokens."""


class Rows(Dataset):
    """`count` pairs of (x [16], class of 4), the same in every process; `slow_s` is the time of reading one."""

    def __init__(self, count: int, *, seed: int = 0, slow_s: float = 0.0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 16, generator=random)
        teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(99))
        self.y = (self.x @ teacher).argmax(dim=1)
        self.slow_s = slow_s

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.slow_s:
            time.sleep(self.slow_s)
        return self.x[index], self.y[index]


class Windows(Dataset):
    """`count` pairs of (tokens [length], next tokens [length]) of the text."""

    def __init__(self, count: int, *, length: int = 16, slow_s: float = 0.0) -> None:
        self.count, self.length, self.slow_s = count, length, slow_s
        self.tokens = torch.tensor(list(TEXT)) % VOCABULARY

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.slow_s:
            time.sleep(self.slow_s)
        start = index * 7 % (len(self.tokens) - self.length - 1)
        window = self.tokens[start : start + self.length + 1]
        return window[:-1], window[1:]


def as_features(pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """A pair of `Windows` as Transformers wants it (its models shift labels themselves)."""
    return {"input_ids": pair[0], "labels": pair[0].clone()}

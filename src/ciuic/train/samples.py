"""Data sets in memory or behind a memory map, addressed by sample number.

A sample is {"input_ids", "labels"} (and "attention_mask" where it is padded), int64 tensors [seq]. Hugging Face's
causal models shift the labels inside: position t is trained to predict labels[t + 1]. So labels equal input_ids, and
-100 marks what is not to be predicted. `torch.utils.data.default_collate` makes a batch [batch, seq] of them.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from ciuic.train.tokenizer import Tokenizer

Sample = dict[str, torch.Tensor]
IGNORED = -100
"""The label of a position that is not predicted."""


class TokenSamples(Dataset[Sample]):
    """Windows of `sequence_length + 1` tokens at a stride of `sequence_length` over one long sequence of tokens.

    Neighbours share one token, so that every token but the first is predicted exactly once per epoch.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int) -> None:
        self._tokens = tokens
        self._stride = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._stride)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self._stride
        input_ids = torch.from_numpy(self._tokens[start : start + self._stride + 1].astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}


class ExampleEncoder:
    """Makes one sample of one text: cut to `sequence_length` tokens, or padded to it with masked positions."""

    def __init__(self, tokenizer: Tokenizer, sequence_length: int) -> None:
        self._tokenizer = tokenizer
        self._length = max(2, sequence_length)

    def __call__(self, text: str) -> Sample:
        """A text with fewer than two tokens has nothing to predict: fillers are added up to two."""
        tokens = self._tokenizer.encode([text.encode("utf-8", errors="replace")], end=True)[0][: self._length]
        filler = [self._tokenizer.filler] * max(0, 2 - len(tokens))
        tokens = np.concatenate([tokens.astype(np.int64), np.asarray(filler, dtype=np.int64)])
        padding = self._length - len(tokens)
        input_ids = torch.from_numpy(np.pad(tokens, (0, padding)))
        mask = torch.zeros(self._length, dtype=torch.int64)
        mask[: len(tokens)] = 1
        return {"input_ids": input_ids, "labels": input_ids.masked_fill(mask == 0, IGNORED), "attention_mask": mask}


class Rows(Protocol):
    """A list of mappings or a `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...


class ExampleSamples(Dataset[Sample]):
    """One sample per row of a table, encoded when it is asked for."""

    def __init__(self, rows: Rows, text_field: str, encode: ExampleEncoder) -> None:
        self._rows = rows
        self._text_field = text_field
        self._encode = encode

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._encode(str(self._rows[index][self._text_field] or ""))


def split_rows(count: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers for training and for the held-out part, both sorted: a fixed choice by a hash of the row number.

    At least one row is held out unless `fraction` is 0, and at least one is left to train on.
    """
    held = round(count * fraction)
    if fraction > 0:
        held = min(max(held, 1), count - 1)
    if held <= 0:
        return np.arange(count), np.arange(0)
    order = np.argsort(_mixed(count), kind="stable")
    return np.sort(order[held:]), np.sort(order[:held])


def _mixed(count: int) -> np.ndarray:
    """A 64-bit hash of each of 0..count-1. Source: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def evenly(samples: TokenSamples | ExampleSamples | Subset[Sample], count: int) -> Subset[Sample]:
    """`count` samples spread evenly over a data set (all of them when there are fewer), always the same ones."""
    total = len(samples)
    chosen = range(total) if total <= count else [number * total // count for number in range(count)]
    return Subset(samples, list(chosen))


def texts_digest(about: Sequence[object], texts: Sequence[str]) -> str:
    """SHA-256 (hex) over what describes a data set and some of its texts."""
    digest = hashlib.sha256(repr(list(about)).encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode("utf-8", errors="replace")).digest())
    return digest.hexdigest()

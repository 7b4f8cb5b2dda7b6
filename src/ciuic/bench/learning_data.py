"""Text for the learning benchmark: the sources of Python's standard library, by byte; a tenth of the files held out."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ciuic.train.corpus import is_held_out, stdlib_documents

HELD_OUT_FRACTION = 0.1
HELD_OUT_SEED = 1234
"""The held-out windows are the same for every run."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Bytes [n] to train on and bytes [m] that are held out, as torch uint8, with a digest over both."""

    train: Tensor
    held_out: Tensor
    digest: str


@lru_cache(maxsize=1)
def load_text() -> Text:
    """Read the standard library once per process. Raises DataError when this Python has no sources."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for document in sorted(stdlib_documents(), key=lambda d: hashlib.sha256(d.key).digest()):  # shares are alike
        parts[is_held_out(document.key, HELD_OUT_FRACTION)].append(document.text)
    train, held_out = (np.frombuffer(b"\n".join(parts[kind]), np.uint8).copy() for kind in (False, True))
    digest = hashlib.blake2b(train.tobytes() + held_out.tobytes(), digest_size=8).hexdigest()
    return Text(train=torch.from_numpy(train), held_out=torch.from_numpy(held_out), digest=digest)


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Windows of length + 1 bytes at `starts` [...] -> int64 [..., length + 1]."""
    return text[starts[..., None] + torch.arange(length + 1)].long()


def held_out_windows(count: int, length: int) -> Tensor:
    """[count, length + 1]: the same in every run."""
    text = load_text().held_out
    starts = np.random.default_rng(HELD_OUT_SEED).integers(0, len(text) - length - 1, count)
    return windows(text, torch.from_numpy(starts), length)


def batch_starts(seed: int, shape: tuple[int, int, int], length: int) -> Tensor:
    """Where each sequence begins: [steps, nodes, batch]. Node w draws from the w-th part of the text."""
    steps, nodes, _ = shape
    share = (len(load_text().train) - length - 1) // nodes
    inside = np.random.default_rng([seed, steps]).integers(0, share, shape)
    return torch.from_numpy(inside + share * np.arange(nodes)[None, :, None])

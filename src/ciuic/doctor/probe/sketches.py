"""Linear sketches of tensors: sketch(a) - sketch(b) = sketch(a - b), so two ranks can tell how far apart they are.

A tensor is folded to at most 4096 numbers by adding its rows with fixed random signs; these are kept for a few sampled
steps, so that a question can be answered later from another thread. On average a fold is as long as its tensor.
"""

import functools
import struct

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ciuic.doctor.facts_model import BLOCKS, SIGNS

WIDTH = 4096
CHUNK_ROWS = 256
SEED = 20_260_730


def fold(tensor: Tensor | None) -> Tensor | None:
    """At most WIDTH numbers of float32 on the CPU, a copy; None for what is not there or holds no floating numbers."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if local.layout is not torch.strided:
        local = local.to_dense()
    if local.is_complex():
        local = torch.view_as_real(local)
    flat = local.reshape(-1)
    if flat.numel() <= WIDTH:
        return flat.to("cpu", torch.float32, copy=True)
    return _folded(flat).cpu()


def _folded(flat: Tensor) -> Tensor:
    rows = flat.numel() // WIDTH
    signs = _signs(rows + 1).to(flat.device)
    body = flat[: rows * WIDTH].view(rows, WIDTH)
    total = torch.zeros(WIDTH, device=flat.device)
    for at in range(0, rows, CHUNK_ROWS):
        part = body[at : at + CHUNK_ROWS].float()
        total += signs[at : at + len(part)] @ part
    tail = flat[rows * WIDTH :]
    total[: len(tail)] += signs[rows] * tail.float()
    return total


@functools.lru_cache(maxsize=64)
def _signs(count: int) -> Tensor:
    random = torch.Generator().manual_seed(SEED)
    return torch.randint(0, 2, (count,), generator=random).float() * 2 - 1


@functools.cache
def _projection() -> Tensor:
    """[SIGNS, WIDTH]; of a shorter fold the first columns count."""
    random = torch.Generator().manual_seed(SEED + 1)
    return (torch.randint(0, 2, (SIGNS, WIDTH), generator=random).float() * 2 - 1) / SIGNS**0.5


def describe(folded: Tensor) -> list[float | int | bytes]:
    """[Length, elements of the fold, SIGNS float32, 4 bytes for each of BLOCKS blocks]. See facts_model.SKETCH."""
    values = (_projection()[:, : folded.numel()] @ folded).tolist() if folded.numel() else [0.0] * SIGNS
    size = -(-folded.numel() // BLOCKS)
    raw = folded.numpy()
    blocks = b"".join(xxhash.xxh32(raw[at * size : (at + 1) * size].tobytes()).digest() for at in range(BLOCKS))
    return [float(folded.norm()), folded.numel(), struct.pack(f"<{SIGNS}f", *values), blocks]

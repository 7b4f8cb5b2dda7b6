"""Digests of batches: cheap enough for every step."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ciuic.doctor.facts_data import FEED_BYTES

LEAVES_MAX = 4
WHOLE_BYTES = 64 << 10
SAMPLE = 2048
TEXT_MAX = 4096
DEPTH_MAX = 6


def batch_digest(batch: Any, *, close: bool = False) -> bytes | None:
    """Of the first tensors, arrays, numbers and texts of a batch; None: nothing that can be looked at.

    Tensors on a device are looked at only when `close`: that waits for the device.
    """
    state, seen = xxhash.xxh3_64(), 0
    for leaf in _leaves(batch, 0):
        data = _bytes_of(leaf, close=close)
        if data is None:
            continue
        state.update(data)
        seen += 1
        if seen == LEAVES_MAX:
            break
    return state.digest()[:FEED_BYTES] if seen else None


def batch_bytes(batch: Any) -> int:
    """Of all tensors in it."""
    return sum(leaf.numel() * leaf.element_size() for leaf in _leaves(batch, 0) if isinstance(leaf, Tensor))


def _leaves(item: Any, depth: int) -> Iterator[Any]:
    if depth > DEPTH_MAX:
        return
    if isinstance(item, Mapping):
        for value in item.values():
            yield from _leaves(value, depth + 1)
    elif isinstance(item, list | tuple):
        for value in item[:64]:
            yield from _leaves(value, depth + 1)
    else:
        yield item


def _bytes_of(leaf: Any, *, close: bool) -> Any:
    if isinstance(leaf, Tensor):
        return _of_tensor(leaf, close=close)
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        flat = leaf.reshape(-1)
        return np.ascontiguousarray(flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE]).view(np.uint8)
    if isinstance(leaf, str):
        return leaf[:TEXT_MAX].encode(errors="replace")
    if isinstance(leaf, bytes):
        return leaf[:TEXT_MAX]
    return repr(leaf).encode() if isinstance(leaf, int | float) and not isinstance(leaf, bool) else None


def _of_tensor(tensor: Tensor, *, close: bool) -> Any:
    local = tensor.detach()
    if type(tensor) is DTensor or local.layout is not torch.strided or local.is_meta or not local.numel():
        return None
    if local.device.type != "cpu":
        if not close:
            return None
        return sample(local).view(torch.uint8).numpy()
    if local.numel() * local.element_size() > WHOLE_BYTES:
        local = sample(local)
    return local.contiguous().reshape(-1).view(torch.uint8).numpy()


def sample(tensor: Tensor, count: int = SAMPLE) -> Tensor:
    """At most `count` elements [count], evenly spread, on the CPU; no copy of the whole is made."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat[:: max(1, len(flat) // count)][:count].to("cpu").contiguous()
    while tensor.dim() > 1 and tensor[0].numel() >= count:
        tensor = tensor[len(tensor) // 2]
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // count)][:count].to("cpu").contiguous()

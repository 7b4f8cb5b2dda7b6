"""A batch as bytes and back: tensors, numbers, texts, and tuples, lists and dictionaries of them; never code."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ciuic.errors import FrameError, UsageError

BATCH_BYTES_MAX = 256 << 20
_DEPTH_MAX = 32
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}


def pack(batch: Any) -> bytes:
    """Raises UsageError, naming what cannot be sent or how long it is."""
    body = msgspec.msgpack.encode(_pack(batch, 0))
    if len(body) > BATCH_BYTES_MAX:
        raise UsageError(
            f"the batch has {len(body)} bytes, too many to send",
            cause=f"limit {BATCH_BYTES_MAX}",
            next="replay a smaller one, or give each rank its own: share=False",
        )
    return body


def unpack(body: bytes, device: torch.device) -> Any:
    """What was packed, in memory of its own; what was not on a CPU comes to `device`. Raises FrameError."""
    try:
        return _unpack(msgspec.msgpack.decode(body), device, 0)
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise FrameError("the batch of rank 0 cannot be read", cause=str(error)) from error


def _pack(item: Any, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise UsageError("the batch is nested too deeply", cause=f"limit {_DEPTH_MAX}")
    if item is None or isinstance(item, bool | int | float | str):
        return item
    if isinstance(item, np.ndarray | np.generic):
        return ["array", _pack(torch.from_numpy(np.array(item)), depth)]
    if isinstance(item, Tensor) and item.layout is torch.strided:
        name = str(item.dtype).removeprefix("torch.")
        if name in _DTYPES:
            flat = item.detach().cpu().contiguous().reshape(-1)
            raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return ["tensor", name, list(item.shape), raw, item.device.type == "cpu", item.requires_grad]
    if isinstance(item, Mapping):
        if not all(isinstance(key, str | int) for key in item):
            raise UsageError("the batch has a dictionary whose keys are neither texts nor numbers")
        return ["dict", [[key, _pack(value, depth + 1)] for key, value in item.items()]]
    if isinstance(item, tuple | list):
        return ["list" if isinstance(item, list) else "tuple", [_pack(each, depth + 1) for each in item]]
    raise UsageError(
        f"the batch has a {type(item).__name__}, which cannot be sent to other ranks",
        next="give each rank the same batch and share=False",
    )


def _unpack(item: Any, device: torch.device, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise ValueError("it is nested too deeply")
    if not isinstance(item, list):
        return item
    kind, *rest = item
    if kind == "tensor":
        return _tensor(rest, device)
    if kind == "array":
        return _unpack(rest[0], device, depth).numpy()
    if kind == "dict":
        return {key: _unpack(value, device, depth + 1) for key, value in rest[0]}
    parts = [_unpack(each, device, depth + 1) for each in rest[0]]
    return parts if kind == "list" else tuple(parts)


def _tensor(rest: list[Any], device: torch.device) -> Tensor:
    name, shape, raw, on_cpu, wants_gradient = rest
    dtype = _DTYPES[name]
    count = 1
    for size in shape:
        count *= int(size)
    if count * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes are not {list(shape)} of {name}")
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    made = flat.reshape(shape)
    made = made if on_cpu else made.to(device)
    return made.requires_grad_() if wants_gradient else made

"""Digests of named tensors, and a tree of them by module: equal roots mean equal bytes in every leaf.

xxh3 over a tensor's bytes runs at several GB/s; torch's own integer and float64 sums are ten times slower on a CPU.
"""

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

DIGEST_BYTES = 8
NONE = b"\0" * DIGEST_BYTES
"""Of a tensor that is not there (a gradient that is None)."""


def digest(tensor: Tensor | None) -> bytes:
    """xxh3, 64 bit, of the bytes of a tensor (of its local part when it is a DTensor), its shape and type."""
    if tensor is None:
        return NONE
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    if local.layout is not torch.strided:
        local = local.coalesce().values() if local.layout is torch.sparse_coo else local.to_dense()
    state = xxhash.xxh3_64(f"{tuple(local.shape)}{local.dtype}".encode())
    if local.device.type == "cpu":
        flat = local.contiguous().reshape(-1)
        state.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    else:
        state.update(int(torch.hash_tensor(local).item()).to_bytes(8, "little", signed=False))
    return state.digest()


def leaves(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, bytes]:
    """Digest of each tensor by name."""
    return {name: digest(tensor) for name, tensor in named}


def root(digests: Mapping[str, bytes]) -> bytes:
    """One digest for all: of names and digests in the order of the names."""
    state = xxhash.xxh3_64()
    for name in sorted(digests):
        state.update(name.encode())
        state.update(digests[name])
    return state.digest()


def children(digests: Mapping[str, bytes], path: str) -> dict[str, bytes]:
    """One level of the tree under a module's path ("": the whole): full path of each child, and its digest."""
    if path in digests:  # a tensor is its own only child
        return {path: digests[path]}
    prefix = f"{path}." if path else ""
    groups: dict[str, dict[str, bytes]] = {}
    for name, value in digests.items():
        if name.startswith(prefix):
            child = prefix + name[len(prefix) :].partition(".")[0]
            groups.setdefault(child, {})[name] = value
    return {child: below[child] if list(below) == [child] else root(below) for child, below in groups.items()}

"""What a data loader says about itself: its sampler, its shares, its data set. No sample is read."""

from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import IterableDataset

CHAIN_MAX = 6
ATTRIBUTES_MAX = 4
ELEMENTS = 32
_PLAIN = (int, str, float, np.integer, np.floating)


def samplers(loader: Any) -> list[Any]:
    """The samplers of a loader, the outermost first: of batches, then of samples."""
    found: list[Any] = []
    current = _inner(loader)
    while current is not None and len(found) < CHAIN_MAX and all(current is not each for each in found):
        found.append(current)
        current = _inner(current)
    return found


def _inner(owner: Any) -> Any:
    found = getattr(owner, "batch_sampler", None)
    return found if found is not None else getattr(owner, "sampler", None)


def sharing(loader: Any) -> Any:
    """The sampler that shares samples out to ranks (as DistributedSampler does), or None."""
    return next((each for each in samplers(loader) if hasattr(each, "num_replicas") and hasattr(each, "rank")), None)


def is_shuffled(loader: Any) -> bool:
    """Whether a sampler draws a random order; a stream's order is its own affair."""
    for each in samplers(loader):
        if isinstance(each, torch.utils.data.RandomSampler | torch.utils.data.SubsetRandomSampler):
            return True
        if isinstance(getattr(each, "shuffle", None), bool):
            return bool(each.shuffle)
    return False


def length_of(item: Any) -> int:
    """len, or -1. Of a loader over a stream too: torch would hold its stream to what it said."""
    if isinstance(getattr(item, "dataset", None), IterableDataset):
        return -1
    try:
        return len(item)
    except Exception:  # noqa: BLE001 - a data set's own code may raise anything
        return -1


def describe(loader: Any) -> dict[str, Any]:
    """The facts of a LOADER notice, without its number."""
    chain, shares = samplers(loader), sharing(loader)
    data = getattr(loader, "dataset", None)
    found: dict[str, Any] = {
        "length": length_of(loader),
        "batch": getattr(loader, "batch_size", None) or next((b for s in chain if (b := _integer(s, "batch_size"))), 0),
        "samples": length_of(data),
        "sampler": type(chain[-1]).__name__ if chain else "",
        "shuffle": is_shuffled(loader),
        "drop_last": bool(getattr(shares, "drop_last", False)),
        "workers": _integer(loader, "num_workers") or 0,
        "stream": isinstance(data, IterableDataset),
        "split": "",
    }
    if shares is not None:
        found |= {
            "split": "index",
            "replicas": _integer(shares, "num_replicas") or 1,
            "place": _integer(shares, "rank") or 0,
        }
        found["seed"] = _integer(shares, "seed") or 0
    for each in (*chain, data):
        count, place = _integer(each, "num_processes"), _integer(each, "process_index")
        if count is not None and place is not None:  # Accelerate's shards
            split = "stream" if isinstance(each, IterableDataset) else "index"
            found |= {"split": split, "replicas": count, "place": place, "seed": 0}
            if split == "stream" and own_share(getattr(each, "dataset", None)):
                found["sharded"] = True
            break
    if found["split"] == "index" and data is not None:
        found["contents"] = contents(data)
    return found


def own_share(data: Any) -> bool:
    """Whether a stream is one of several shares already: Hugging Face's split_dataset_by_node says so."""
    info = getattr(data, "_distributed", None)
    return info is not None and (_integer(info, "world_size") or 1) > 1


def contents(data: Any) -> dict[str, list[Any]]:
    """By name of an attribute with one element for each sample: [digest of some of them, 1 when with fractions]."""
    count, found = length_of(data), {}
    for _ in range(CHAIN_MAX):
        attributes = vars(data) if hasattr(data, "__dict__") else {}
        for name, value in attributes.items():
            parts = value if isinstance(value, tuple) and all(isinstance(each, Tensor) for each in value) else (value,)
            for at, part in enumerate(parts):
                known = _digest(part, count)
                if known is not None and len(found) < ATTRIBUTES_MAX:
                    found.setdefault(f"{name}.{at}" if len(parts) > 1 else name, known)
        if isinstance(data, list | tuple) and (known := _digest(data, count)) is not None:
            found["items"] = known
        inner = next(
            (v for v in attributes.values() if isinstance(v, torch.utils.data.Dataset) and length_of(v) == count), None
        )
        if inner is None or found:
            break
        data = inner
    return found


def _digest(values: Any, count: int) -> list[Any] | None:
    if count < 2 or not isinstance(values, list | tuple | range | np.ndarray | Tensor) or length_of(values) != count:
        return None
    if isinstance(values, Tensor) and (
        values.device.type != "cpu" or values.layout is not torch.strided or values.is_meta
    ):
        return None
    state, fractions, first, is_constant = xxhash.xxh3_64(), False, None, True
    for at in sorted({round(k * (count - 1) / (ELEMENTS - 1)) for k in range(ELEMENTS)}):
        element = _element(values[at])
        if element is None:
            return None
        first = element[0] if first is None else first
        is_constant &= element[0] == first
        fractions |= element[1]
        state.update(element[0])
    return None if is_constant else [state.digest(), int(fractions)]


def _element(value: Any) -> tuple[bytes, bool] | None:
    if isinstance(value, Tensor):
        value = (
            value.detach().reshape(-1)[:64].float().numpy()
            if value.is_floating_point()
            else value.reshape(-1)[:64].numpy()
        )
    if isinstance(value, np.ndarray) and value.dtype != object:
        return np.ascontiguousarray(value.reshape(-1)[:64]).tobytes(), value.dtype.kind == "f"
    if isinstance(value, tuple | list):
        parts = [part for each in value[:4] if (part := _element(each)) is not None]
        return (b"|".join(part[0] for part in parts), any(part[1] for part in parts)) if parts else None
    if isinstance(value, _PLAIN):
        return repr(value).encode()[:256], isinstance(value, float | np.floating)
    return None


def _integer(owner: Any, name: str) -> int | None:
    value = getattr(owner, name, None)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None

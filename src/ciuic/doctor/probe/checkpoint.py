"""What a file that torch.load has read holds: weights, states of optimizers, schedulers and scalers, counters."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash
from torch import Tensor

from ciuic.doctor.probe.batches import sample
from ciuic.doctor.probe.progress import STEP_KEYS, counter

DEPTH_MAX = 3
ITEMS_MAX = 64
TENSORS_MAX = 2048
ELEMENTS = 64
SETTINGS = ("initial_lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "alpha", "amsgrad")


@dataclass(kw_only=True)
class Saved:
    """The state of one optimizer."""

    has_state: bool
    groups: list[tuple[int, tuple[Any, ...]]]
    """Of each group: number of parameters and settings."""


@dataclass(kw_only=True)
class File:
    """Remembers no tensor."""

    name: str
    optimizers: list[Saved] = field(default_factory=list)
    last_epochs: list[int] = field(default_factory=list)
    """Of schedulers."""
    scales: list[float] = field(default_factory=list)
    """Of loss scalers."""
    tensors: set[bytes] = field(default_factory=set)
    """Digests of weights."""
    steps: int = -1
    is_asked: bool = False
    """The program named its parts before it was read."""

    @property
    def is_training_state(self) -> bool:
        """More than weights."""
        return bool(self.optimizers or self.last_epochs or self.scales)


def look(where: Any, what: Any) -> File:
    """What is in it, to a small depth."""
    file = File(name=os.path.basename(path_of(where)) or "a file", steps=counter(what, STEP_KEYS))
    for item in _items(what, 0):
        if is_optimizer(item):
            groups = [settings_of(group) for group in item["param_groups"] if isinstance(group, Mapping)]
            file.optimizers.append(Saved(has_state=bool(item["state"]), groups=groups))
        elif "last_epoch" in item and "_step_count" in item:
            file.last_epochs.append(int(item["last_epoch"]))
        elif "scale" in item and "growth_factor" in item:
            file.scales.append(float(item["scale"]))
        else:
            for value in list(item.values())[:TENSORS_MAX]:
                key = tensor_key(value)
                if key is not None:
                    file.tensors.add(key)
    return file


def path_of(where: Any) -> str:
    """Absolute path, or empty for a file that is open already."""
    if isinstance(where, str | os.PathLike):
        return os.path.abspath(os.fspath(where)) if not isinstance(os.fspath(where), bytes) else ""
    return ""


def is_optimizer(item: Mapping[Any, Any]) -> bool:
    """Has the form of Optimizer.state_dict."""
    return isinstance(item.get("state"), Mapping) and isinstance(item.get("param_groups"), list)


def settings_of(group: Mapping[str, Any]) -> tuple[int, tuple[Any, ...]]:
    """Number of parameters and what a schedule does not change."""
    values = [group.get(name) for name in SETTINGS]
    if values[0] is None:
        values[0] = group.get("lr")
    kept = tuple(tuple(v) if isinstance(v, list) else v for v in values if not isinstance(v, Tensor))
    return len(group.get("params", ())), kept


def tensor_key(value: Any) -> bytes | None:
    """Digest of a few elements of a tensor on the CPU, with its shape; None for constants and for what is no weight."""
    if (
        not isinstance(value, Tensor)
        or value.device.type == "meta"
        or not value.is_floating_point()
        or value.numel() < 2
    ):
        return None
    if hasattr(value, "device_mesh"):
        return None
    part = sample(value, ELEMENTS).float()
    if bool((part == part[0]).all()):
        return None
    return xxhash.xxh3_64(part.numpy().tobytes() + repr(tuple(value.shape)).encode()).digest()


def _items(what: Any, depth: int) -> Iterator[Mapping[Any, Any]]:
    """Mappings of interest: not what is inside a state of an optimizer."""
    if depth > DEPTH_MAX:
        return
    if isinstance(what, Mapping):
        yield what
        inside = [] if is_optimizer(what) else list(what.values())
    else:
        inside = list(what) if isinstance(what, list | tuple) else []
    for each in inside[:ITEMS_MAX]:
        if isinstance(each, Mapping | list | tuple):
            yield from _items(each, depth + 1)

"""One load_state_dict of a module: how much of what was given it took."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn

from ciuic.doctor.probe.checkpoint import tensor_key

TENSORS_MAX = 512
CONTENTS_MAX = 64
PREFIX_PARTS = 4


@dataclass(eq=False, kw_only=True)
class Load:
    """Remembers no tensor."""

    module: weakref.ref[nn.Module]
    name: str
    given: int
    own: int
    unexpected: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    prefix: str = ""
    """That makes names of the state names of the module, `-` before it when the state lacks it."""
    prefixed: int = 0
    """Unexpected names to which this applies."""
    contents: bytes = b""
    samples: dict[int, tuple[torch.dtype, bytes]] = field(default_factory=dict)
    """By id of a parameter: its type and digest right after the load."""

    @property
    def used(self) -> int:
        """Names of the state that the module has."""
        return self.given - len(self.unexpected)

    def facts(self) -> dict[str, Any]:
        """Of a LOADED notice."""
        return {
            "module": self.name,
            "given": self.given,
            "own": self.own,
            "used": self.used,
            "unexpected": self.unexpected[:3],
            "missing": self.missing[:3],
            "missing_count": len(self.missing),
            "prefix": self.prefix,
            "prefixed": self.prefixed,
            "contents": self.contents,
        }


def load_of(module: nn.Module, state: Any, result: Any) -> Load:
    """Right after it has returned."""
    names = [str(name) for name in state] if isinstance(state, Mapping) else []
    missing = [str(name) for name in getattr(result, "missing_keys", ())]
    unexpected = [str(name) for name in getattr(result, "unexpected_keys", ())]
    load = Load(
        module=weakref.ref(module),
        name=type(module).__name__,
        given=len(names),
        own=len(names) - len(unexpected) + len(missing),
        unexpected=unexpected,
        missing=missing,
        contents=_contents(state),
    )
    load.prefix, load.prefixed = common_prefix(unexpected, missing)
    gone = set(missing)
    parameters = [(name, p) for name, p in module.named_parameters() if name not in gone]
    for _, parameter in parameters[:: max(1, len(parameters) // TENSORS_MAX)]:
        key = tensor_key(parameter)
        if key is not None:
            load.samples[id(parameter)] = parameter.dtype, key
    return load


def changed(load: Load, own: Mapping[int, str]) -> tuple[list[str], int]:
    """Names of parameters of a model that have other values than right after the load, and how many were looked at."""
    module = load.module()
    if module is None:
        return [], 0
    found, total = [], 0
    for parameter in module.parameters():
        known = load.samples.get(id(parameter))
        name = own.get(id(parameter))
        if known is None or name is None or known[0] != parameter.dtype:  # a cast changes values
            continue
        now = tensor_key(parameter)
        total += 1
        if now != known[1]:
            found.append(name)
    return found, total


def common_prefix(unexpected: list[str], missing: list[str]) -> tuple[str, int]:
    """The prefix that most unexpected names have too much (or too little, with `-` before it), and how many have it."""
    counts: dict[str, int] = {}
    for longer, shorter, sign in ((unexpected, set(missing), ""), (missing, set(unexpected), "-")):
        for name in longer[:TENSORS_MAX] if shorter else ():
            parts = name.split(".")
            for cut in range(1, min(PREFIX_PARTS, len(parts) - 1) + 1):
                if ".".join(parts[cut:]) in shorter:
                    prefix = sign + ".".join(parts[:cut]) + "."
                    counts[prefix] = counts.get(prefix, 0) + 1
                    break
    if not counts:
        return "", 0
    best = max(counts, key=lambda prefix: counts[prefix])
    return best, counts[best]


def _contents(state: Any) -> bytes:
    digest = xxhash.xxh3_64()
    for value in list(state.values())[:CONTENTS_MAX] if isinstance(state, Mapping) else ():
        digest.update(tensor_key(value) or b"-")
    return digest.digest()

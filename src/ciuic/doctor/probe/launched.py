"""What the ranks of one run must have in common before they begin: versions, interfaces, the model's layout."""

import os
import platform
import sys
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from ciuic.doctor.facts_launch import HOST, LAYOUT, PARTS_MAX
from ciuic.doctor.preflight.interfaces import interface_problems
from ciuic.doctor.probe.part import Part

LAYOUTS_MAX = 8
DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
"""Of NVIDIA and of AMD."""
LIBRARIES = ("transformers", "accelerate", "lightning", "peft", "deepspeed")


class Launched(Part):
    """Notices HOST and LAYOUT."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._layouts = 0
        gloo, nccl = interface_problems(os.environ, gpus=has_gpus())
        probe.note(HOST, versions=_versions(), gloo=gloo, nccl=nccl)

    def wrapping(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """DDP compares shapes itself and ends all ranks with one message; this says which rank and where."""
        if self._layouts >= LAYOUTS_MAX or keywords.get("device_mesh") is not None:
            return
        group = keywords.get("process_group", arguments[6] if len(arguments) > 6 else None)
        ranks = list(dist.get_process_group_ranks(group)) if group is not None else []
        self.probe.note(LAYOUT, number=self._layouts, ranks=ranks, **layout_of(module))
        self._layouts += 1
        self.probe.courier.flush(0.2)  # what comes next may end the process


def has_gpus() -> bool:
    """Whether there are any for NCCL. CUDA is not asked: that would fix which ones this process may see, and a program
    may choose its own after `import torch`."""
    return torch.backends.cuda.is_built() and any(os.path.exists(path) for path in DRIVERS)


def layout_of(module: nn.Module) -> dict[str, Any]:
    """Counts and digest of names, shapes and types of the trainable parameters."""
    state = xxhash.xxh3_64()
    tensors = elements = 0
    parts: dict[str, list[int]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        state.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
        tensors, elements = tensors + 1, elements + parameter.numel()
        part = parts.setdefault(".".join(name.split(".")[:2]), [0, 0])
        part[0], part[1] = part[0] + 1, part[1] + parameter.numel()
    shown = dict(list(parts.items())[:PARTS_MAX])
    return {"tensors": tensors, "elements": elements, "digest": state.digest(), "parts": shown}


def _versions() -> dict[str, str]:
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": str(torch.__version__)}
    for name in LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found

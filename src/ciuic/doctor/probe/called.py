"""Which modules were called in a step: a module that was called should have given its parameters a gradient."""

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ciuic.doctor.probe.compiled import has_compiled

FRAMES_MAX = 80
CALLED, REENTRANT, WITHOUT = "called", "reentrant", "without"


class Called:
    """A hook on all modules, in sampled steps only. With torch.compile there is none: it would have to compile anew."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe
        self._how: dict[int, str] = {}
        self._handle: Any = None
        self._has_trained = False

    @property
    def is_watching(self) -> bool:
        """Whether `how` knows the calls of this step."""
        return self._handle is not None and self._has_trained

    def begin(self) -> None:
        """A step begins whose calls are wanted."""
        self._how.clear()
        self._has_trained = False
        if self._handle is None and not self._is_compiled():
            self._handle = register_module_forward_pre_hook(self._seen)

    def end(self) -> None:
        """Not wanted any more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def training_pass(self) -> None:
        """A model's own forward pass begins, with gradients."""
        self._has_trained = True

    def how(self, module: nn.Module) -> str:
        """`called`, `reentrant` (inside a checkpoint that is never computed again), `without` (under no_grad), or "
        "empty."""
        return self._how.get(id(module), "")

    def _seen(self, module: nn.Module, inputs: Any) -> None:
        key = id(module)
        if torch.is_grad_enabled():
            self._how[key] = CALLED
        elif module.training and self._how.get(key) != CALLED:
            self._how[key] = REENTRANT if _in_checkpoint() else WITHOUT

    def _is_compiled(self) -> bool:
        if has_compiled():
            return True
        if "torch._dynamo.eval_frame" not in sys.modules:
            return False
        kind = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
        for model in self._probe.models:
            for module in model.module.modules():
                if isinstance(module, kind) or getattr(module, "_compiled_call_impl", None) is not None:
                    return True
        return False


def _in_checkpoint() -> bool:
    frame: Any = sys._getframe(2)
    for _ in range(FRAMES_MAX):
        if frame is None:
            return False
        if frame.f_code.co_name == "forward" and frame.f_code.co_filename.endswith("utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False

"""A closer look at one step, after something was not finite: which module, which parameter's own gradient."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ciuic.doctor.facts_training import GRADIENT_NOT_FINITE
from ciuic.doctor.probe.on_module import OnModule
from ciuic.doctor.probe.probe import Probe

WINDOWS_MAX = 6
"""Steps that are looked at so closely, in a run."""
MODULES_MAX = 2000


class Closer:
    """`turn` after each step: hooks for the next one where that is wanted, and none otherwise."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._handles: list[Any] = []
        self._left = WINDOWS_MAX
        self.module = ""
        """The first module in this step whose output is not finite while its inputs are."""
        self._gradient = ""

    @property
    def is_on(self) -> bool:
        """Whether this step is looked at."""
        return bool(self._handles)

    def turn(self, *, wanted: bool) -> None:
        """One step is over."""
        while self._handles:
            self._handles.pop().remove()
        self.module = self._gradient = ""
        if not wanted or self._left == 0:
            return
        self._left -= 1
        for model in self._probe.models:
            if model.kind == "sharded":
                continue
            for name, module in list(model.module.named_modules())[:MODULES_MAX]:
                if not any(True for _ in module.children()) and not isinstance(module, torch.jit.ScriptModule):
                    self._handles.append(module.register_forward_hook(OnModule(self._outputs(name))))
            for name, parameter in model.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    self._handles.append(parameter.register_hook(self._gradients(name)))

    def _outputs(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self.module and not _is_finite(output) and _is_finite(inputs):
                self.module = name

        return look

    def _gradients(self, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if not self._gradient and not _is_finite(gradient):
                self._gradient = name
                kind = "nan" if bool(torch.isnan(gradient).any()) else "inf"
                self._probe.note(GRADIENT_NOT_FINITE, parameter=name, value=kind)

        return look


def _is_finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_finite(item) for item in value)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        return True
    return bool(torch.isfinite(value.detach()).all())


def first_not_finite(pairs: Iterable[tuple[str, Tensor]]) -> str:
    """Name of the first tensor that has an element which is not finite; empty: there is none."""
    return next((name for name, tensor in pairs if not _is_finite(tensor)), "")

"""Evidence about clipping, loss scaling and numbers that are not finite."""

import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ciuic.doctor.facts_training import (
    CLIP,
    EARLY_CLIP,
    HALF,
    LOSS_NOT_FINITE,
    PARTIAL_CLIP,
    SCALED_STEP,
    SCALER,
    SKIPPED,
)
from ciuic.doctor.probe.closer import Closer, first_not_finite
from ciuic.doctor.probe.lossscale import as_number
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.scaledsteps import ScaledSteps
from ciuic.doctor.probe.witness import UNKNOWN

FAR = 200.0
"""A norm so many times its limit is far above it."""
NOTICES_MAX = 16
SMALLEST_NORMAL = 2.0**-14
"""Of float16; below it a number loses digits, and below 2**-25 it is zero."""
SAMPLE_PARAMETERS, SAMPLE_ELEMENTS = 16, 4096


class Precision(Part):
    """Counts always; the norm of a device's gradients is read on sampled steps only."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self.close = True
        self._closer = Closer(probe)
        self._scaled = ScaledSteps(probe)
        self._clips: list[Any] = [0, 0.0, 0.0, 0]
        self._early: list[float] = [0, 0.0]
        self._partial = 0
        """Clips since the last record after which another backward pass came before gradients were used or cleared."""
        self._clipped: tuple[Tensor, int, int] | None = None
        """A parameter whose gradient was clipped, which tensor that was, and how often it was written to."""
        self._open_scaler: Any = None
        self._unscaled: set[int] = set()
        self._loss: Tensor | None = None
        self._inputs: list[weakref.ref[Tensor]] = []
        self._is_half = False
        self._has_scaler = False
        self._bad_loss = False
        self._notices = 0
        self._skipped: dict[int, list[int]] = {}

    # ---- losses ----------------------------------------------------------------------------------------------------

    def forward_begin(self, model: Model, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = (*inputs, *keywords.values())
        self._inputs = [weakref.ref(item) for item in given if type(item) is Tensor and item.is_floating_point()]
        if self.close:
            device = next((item.device.type for item in given if isinstance(item, Tensor)), "cpu")
            self._is_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16

    def scaled(self, scaler: Any, loss: Any) -> None:
        self._has_scaler = True
        self._scaled.scaled(scaler)
        self._loss = loss if type(loss) is Tensor else None
        if self._open_scaler is None:
            self._open_scaler = scaler
            self._unscaled.clear()

    def backward_begin(self, roots: tuple[Tensor, ...]) -> None:
        self._scaled.begins()
        if self._clipped is not None:
            parameter, gradient, written = self._clipped
            now = parameter.grad
            self._partial += now is not None and (id(now), now._version) == (gradient, written)
            self._clipped = None
        root = self._loss if self._loss is not None else roots[0] if len(roots) == 1 else None
        self._loss = None
        if root is None or type(root) is not Tensor or root.numel() != 1:
            return
        if root.device.type != "cpu" and not (self.close or self._closer.is_on):
            return
        value = root.item()
        if math.isfinite(value):
            return
        self._bad_loss = True
        if self._notices < NOTICES_MAX:
            self._notices += 1
            self.probe.note(LOSS_NOT_FINITE, value=str(value), **self._where())

    def backward_end(self, roots: tuple[Tensor, ...]) -> None:
        self._scaled.ends()

    def _where(self) -> dict[str, str]:
        """Where a loss that is not finite came from, as far as that can be seen from here."""
        found = {"input": "", "parameter": "", "module": self._closer.module}
        for at, reference in enumerate(self._inputs):
            tensor = reference()
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                found["input"] = str(at)
        pairs = [pair for model in self.probe.models if model.kind != "sharded" for pair in model.parameters()]
        found["parameter"] = first_not_finite(pairs)
        return found

    # ---- clipping and scaling ----------------------------------------------------------------------------------------

    def clipped(self, parameters: list[Tensor], limit: float, norm: Any) -> None:
        if not math.isfinite(limit):
            return  # only to see the norm
        if self._open_scaler is not None and not self._is_unscaled(parameters):
            self._early = [self._early[0] + 1, self._open_scaler.get_scale()]
        self._clips[0] += 1
        first = next((each for each in parameters if each.grad is not None), None)
        if first is not None and first.grad is not None:
            self._clipped = first, id(first.grad), first.grad._version
        on_cpu = not isinstance(norm, Tensor) or norm.device.type == "cpu"
        size = as_number(norm) if self.close or on_cpu else UNKNOWN
        self._clips[1:3] = [size, limit]
        if size != UNKNOWN:
            far = math.isfinite(size) and size > FAR * limit > 0
            self._clips[3] = self._clips[3] + 1 if far else 0

    def unscaled(self, scaler: Any, optimizer: Optimizer) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        self._unscaled.add(id(inner))
        self._scaled.unscaled(inner)

    def scale_updated(self, scaler: Any, before: float) -> None:
        self._open_scaler = None

    def _is_unscaled(self, parameters: list[Tensor]) -> bool:
        wanted = id(parameters[0]) if parameters else 0
        for optimizer in self.probe.optimizers:
            if any(id(parameter) == wanted for group in optimizer.param_groups for parameter in group["params"]):
                return id(optimizer) in self._unscaled
        return bool(self._unscaled)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def before_step(self, step: Step) -> None:
        if self._has_scaler:
            found = self._scaled.used(step)
            if found is not None:
                step.facts[SCALED_STEP] = found
        if step.due and self._is_half and not self._has_scaler and not step.closure:
            found = _lost_in_half(step.optimizer)
            if found is not None:
                step.facts[HALF] = found

    def after_step(self, step: Step) -> None:
        skipped = self._skipped.setdefault(step.index, [0, 0])
        if step.scaler is not None:
            if step.taken:
                skipped[1] = 0
            else:
                skipped[0], skipped[1] = skipped[0] + 1, skipped[1] + 1
                self._tell_skip(step, skipped[1])
        if step.due:
            if step.scaler is not None:
                step.facts[SCALER] = [step.scaler.get_scale(), *skipped]
            if step.index == 0 and self._clips[2]:
                step.facts[CLIP] = list(self._clips)
                self._clips[0] = 0
            if step.index == 0 and self._partial:
                step.facts[PARTIAL_CLIP] = self._partial
                self._partial = 0
            if self._early[0]:
                step.facts[EARLY_CLIP] = list(self._early)
        self._clipped = None
        if step.index == 0:
            self._closer.turn(wanted=self._bad_loss or skipped[1] >= 2)
            self._bad_loss, self._is_half = False, False
            self.close = self.probe.sampler.due(step.number + 1)

    def _tell_skip(self, step: Step, in_a_row: int) -> None:
        if in_a_row <= 12 or in_a_row % 20 == 0:
            scale = step.scaler.get_scale()
            self.probe.note(
                SKIPPED,
                optimizer=step.index,
                scale=scale,
                in_a_row=in_a_row,
                finite_loss=not self._bad_loss,
                attempt=step.number,
            )


def _lost_in_half(optimizer: Optimizer) -> list[float] | None:
    """Share of zeros among some gradient elements, and of subnormal ones among the others."""
    elements = zeros = small = 0
    own = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter in [each for each in own if type(each.grad) is Tensor][:SAMPLE_PARAMETERS]:
        part = parameter.grad.detach().reshape(-1)[:SAMPLE_ELEMENTS].abs()
        none = int((part == 0).sum())
        elements += part.numel()
        zeros += none
        small += int((part < SMALLEST_NORMAL).sum()) - none
    if not elements:
        return None
    return [zeros / elements, small / max(1, elements - zeros)]

"""Automatic mixed precision by the same code on CPU and GPU: autocast, and loss scaling for fp16."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

Mode = Literal["off", "bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(mode: Mode, device: torch.device) -> AbstractContextManager[object]:
    """The context for a forward pass: matrix products in the mode's type, sums and losses in single precision."""
    if mode == "off":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[mode])


def make_scaler(mode: Mode, device: torch.device) -> GradScaler:
    """A scaler that is active for fp16 only: gradients below 6e-8 would be zero in fp16, bf16 has the range of fp32."""
    return GradScaler(device.type, enabled=mode == "fp16")


def scaled_step(
    optimizer: torch.optim.Optimizer, scaler: GradScaler, clip: float, parameters: Iterable[nn.Parameter]
) -> bool:
    """Unscale, clip to the norm `clip` (0: no clipping), step, and adapt the scale.

    Returns False when the scaler found an infinity or a NaN and left the step out.
    """
    scaler.unscale_(optimizer)
    if clip > 0:
        nn.utils.clip_grad_norm_(parameters, clip)
    scale_before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale_before

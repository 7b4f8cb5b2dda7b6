"""Follows a few gradient elements from the backward pass to the step: by what were they multiplied on the way?"""

import functools
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ciuic.doctor.facts_training import PROJECTIONS

ELEMENTS_MAX = 1024
CANDIDATES_MAX = 64
UNKNOWN = -1.0
_PACKED = struct.Struct(f"<{PROJECTIONS}f")


class Witness:
    """Of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameter: Tensor | None = None
        self._number = -1
        self._local: bytes | None = None
        self._expected = 1.0
        self._handed: Tensor | None = None
        self._is_own = False
        """What is followed was this rank's own, before the reduction, though DDP reduces."""

    @property
    def parameter(self) -> Tensor | None:
        """The one that is followed; None: not chosen yet."""
        return self._parameter

    def produced(self) -> None:
        """A backward pass has ended."""
        handed, self._handed = self._handed, None
        self._is_own = handed is not None
        if handed is None and self._parameter is not None:
            handed = self._parameter.grad
        self._local = project(handed)
        self._expected = 1.0

    def handed(self, bucket: Any) -> None:
        """A communication hook is about to reduce these gradients."""
        for at, parameter in enumerate(bucket.parameters() if self._parameter is not None else ()):
            if parameter is self._parameter:
                self._handed = bucket.gradients()[at].detach().reshape(-1)[:ELEMENTS_MAX].clone()

    def multiplied(self, factor: float | None) -> None:
        """Clipping or unscaling has multiplied it; None: by something unknown."""
        self._expected = UNKNOWN if factor is None or self._expected == UNKNOWN else self._expected * factor

    def used(self, kind: str) -> list[Any] | None:
        """The optimizer gets its gradients now; what became of the ones that were followed."""
        final = None if self._parameter is None else project(self._parameter.grad)
        local, self._local = self._local, None
        if final is None:
            self._choose()
            return None
        if local is None or self._expected <= 0:
            return None
        return [self._number, local, final, self._expected, "plain" if self._is_own and kind == "ddp" else kind]

    def _choose(self) -> None:
        """Small matrices first: the same on all ranks, and rarely empty as rows of an embedding or experts are."""
        own = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        order = sorted(range(len(own)), key=lambda number: _rank(own[number]))
        self._parameter, self._number = None, -1
        for number in order[:CANDIDATES_MAX]:
            if project(own[number].grad) is not None:
                self._parameter, self._number = own[number], number
                return


def _rank(parameter: Tensor) -> tuple[bool, bool, int]:
    return parameter.dim() < 2, parameter.numel() < PROJECTIONS, parameter.numel()


def project(gradient: Tensor | None) -> bytes | None:
    """A few fixed linear functions of the first elements, as float32; None: no gradient, all zero or not finite."""
    part = _part(gradient)
    if part is None:
        return None
    values = _weights()[:, : len(part)] @ part
    if not np.all(np.isfinite(values)) or not np.any(values):
        return None
    with np.errstate(over="ignore"):
        return _PACKED.pack(*np.clip(values, -3e38, 3e38))


def _part(gradient: Tensor | None) -> np.ndarray | None:
    if gradient is None:
        return None
    local = gradient.to_local() if type(gradient) is DTensor else gradient
    if type(local) not in (Tensor, torch.nn.Parameter) or local.layout is not torch.strided or not local.numel():
        return None
    if not local.is_floating_point() or not local.is_contiguous() or local.is_meta:
        return None
    return local.detach().view(-1)[:ELEMENTS_MAX].to("cpu", torch.float64).numpy()


@functools.cache
def _weights() -> np.ndarray:
    """[PROJECTIONS, ELEMENTS_MAX] float64, the same everywhere."""
    rows = np.arange(1, PROJECTIONS + 1)[:, None] * np.sqrt(np.array([2.0, 3.0, 5.0, 7.0]))[:, None]
    return np.cos(rows * np.arange(1, ELEMENTS_MAX + 1)[None, :])

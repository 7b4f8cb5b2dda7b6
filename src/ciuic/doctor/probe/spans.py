"""Which parameter, or whose gradient, a tensor shares memory with."""

import bisect
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ciuic.doctor.probe.part import Model


class Spans:
    """Addresses of all gradients of some models, or of the parameters themselves, as they are now."""

    def __init__(self, models: Iterable[Model], *, of_gradients: bool = True) -> None:
        found: list[tuple[int, int, Model, str]] = []
        for model in models:
            for name, parameter in model.parameters():
                low, high = _span(parameter.grad if of_gradients else parameter)
                if low < high:
                    found.append((low, high, model, name))
        found.sort(key=lambda span: span[:2])
        self._found = found
        self._lows = [low for low, _, _, _ in found]

    def find(self, tensor: Tensor) -> tuple[Model, str] | None:
        """The first one that shares memory with it: its model and name."""
        low, high = _span(tensor)
        at = bisect.bisect_left(self._lows, high) - 1
        if low >= high or at < 0 or self._found[at][1] <= low:
            return None
        while at > 0 and self._found[at - 1][1] > low:
            at -= 1
        return self._found[at][2], self._found[at][3]


def _span(tensor: Tensor | None) -> tuple[int, int]:
    """First and last address (exclusive) of a dense tensor's elements."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local is None or local.layout is not torch.strided or local.numel() == 0 or local.is_meta:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return local.data_ptr(), local.data_ptr() + (last + 1) * local.element_size()

"""Initial weights that depend on the seed only, not on the machine.

torch's own normal numbers differ between processors (its AVX2 path uses other logarithms than the portable one), so two
nodes that build the same model from the same seed would start with different bits. Here NumPy draws them in double
precision; rounding to single precision hides what differs between mathematics libraries.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_CHUNK = 1 << 20


class _PortableNormal(TorchDispatchMode):
    """Fills with NumPy's normal numbers wherever torch would fill a tensor on the CPU with its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = np.random.Generator(np.random.Philox(seed))

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.normal_.default and args[0].device.type == "cpu":
            mean = args[1] if len(args) > 1 else kwargs.get("mean", 0.0)
            std = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
            return self._fill(args[0], float(mean), float(std))
        return func(*args, **kwargs)

    def _fill(self, tensor: torch.Tensor, mean: float, std: float) -> torch.Tensor:
        values = torch.empty(tensor.numel(), dtype=torch.float32)
        for start in range(0, tensor.numel(), _CHUNK):
            part = values[start : start + _CHUNK]
            part.numpy()[:] = self._draw.standard_normal(part.numel()) * std + mean
        return tensor.copy_(values.view(tensor.shape))


@contextmanager
def initial_weights(seed: int) -> Generator[None]:
    """Within it, modules built on the CPU get weights that follow `seed`, the same on every machine.

    The global random state is as before afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _PortableNormal(seed):
            yield

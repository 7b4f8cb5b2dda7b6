"""The outer optimizer: what the hub does with the weighted mean of a round's pushes. Pure, fp32, no fused operations.

    momentum 0   u = lr d                                           plain (weighted) averaging at lr 1
    delay 1      mom = mu mom + d;  u = lr (d + mu mom)             torch's SGD with nesterov=True
    delay N      Delta += d;  u = lr (d + c), where c = mu mom only at every N-th entry, after
                 mom = mu mom + Delta;  Delta = 0                   Delayed Nesterov, arXiv 2401.09135 (c = 0 there)

Delayed Nesterov is for `async`, where each push makes an entry: momentum then moves once per N pushes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """SGD on pseudo-gradients; lr 1 and momentum 0 is plain averaging."""

    lr: float = 1.0
    momentum: float = 0.0
    delay: int = 1
    """Entries between two steps of the momentum."""

    def start(self, element_count: int) -> "OuterState":
        """State before the first entry."""
        needs = bool(self.momentum)
        return OuterState(
            momentum=np.zeros(element_count, np.float32) if needs else None,
            delayed=np.zeros(element_count, np.float32) if needs and self.delay > 1 else None,
        )

    def step(self, mean: Float, state: "OuterState", version: int) -> tuple[Float, "OuterState"]:
        """(update [n], next state) for the weighted mean [n] of the entry that makes `version`. `mean` is consumed."""
        lr, mu = np.float32(self.lr), np.float32(self.momentum)
        if state.momentum is None:
            if lr != 1:
                mean *= lr
            return mean, state
        if state.delayed is None:
            momentum = state.momentum * mu
            momentum += mean
            return self._with(mean, momentum * mu), OuterState(momentum=momentum)
        delayed = state.delayed + mean
        if version % self.delay:
            return self._with(mean, None), OuterState(momentum=state.momentum, delayed=delayed)
        momentum = state.momentum * mu
        momentum += delayed
        return self._with(mean, momentum * mu), OuterState(momentum=momentum, delayed=np.zeros_like(delayed))

    def _with(self, mean: Float, kick: Float | None) -> Float:
        if kick is not None:
            mean += kick
        mean *= np.float32(self.lr)
        return mean


@dataclass(frozen=True, kw_only=True)
class OuterState:
    """Vectors [n] of an outer optimizer; None where it needs none."""

    momentum: Float | None = None
    delayed: Float | None = None
    """Sum of the means since the momentum's last step."""

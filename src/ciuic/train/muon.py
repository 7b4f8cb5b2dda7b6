"""Muon for stacks of matrices: the experts of a mixture, one parameter [experts, rows, columns].

torch.optim.Muon takes matrices only. This takes the same arguments and computes the same for each matrix of a stack.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of each matrix of [..., rows, columns] near 1, in bfloat16; zeros stay zeros.

    Newton-Schulz iteration with the coefficients of torch.optim.Muon (source: kellerjordan.github.io/posts/muon).
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x


class StackedMuon(Optimizer):
    """Muon with Nesterov momentum for parameters [stack, rows, columns]; update of rms about 0.2 x lr, as AdamW's."""

    def __init__(self, params: Any, lr: float = 1e-3, *, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum, lr = self.state[parameter], group["momentum"], float(group["lr"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = orthogonalise(gradient.lerp(average, momentum))
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape[-2:])))

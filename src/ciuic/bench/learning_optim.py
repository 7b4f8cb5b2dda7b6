"""The inner optimizers over a stack: AdamW for everything, or Muon for the matrices and AdamW for the rest.

Every node has a state of its own. Muon computes what `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` computes, for
the matrices of all nodes in one batched product and in fp32 (torch's own rounds the iteration to bfloat16).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ciuic.bench.learning_stack import Stack

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.99), 1e-8, 0.1
MUON_MOMENTUM, NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS = 0.9, (3.4445, -4.7750, 2.0315), 5


def cosine(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate at `step` of `steps`: linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def adamw(parameters: Sequence[Tensor], gradients: Sequence[Tensor], lr: float) -> torch.optim.AdamW:
    """torch's AdamW over flat vectors whose gradients are these vectors."""
    optimizer = torch.optim.AdamW(list(parameters), lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return optimizer


class Inner:
    """The inner optimizer of all nodes of a stack."""

    def __init__(self, stack: Stack, lr: float, *, muon_multiplier: float = 0.0, matrices: Mapping[str, int]) -> None:
        """`muon_multiplier` > 0: weights whose names end as one of `matrices` by Muon at lr x multiplier."""
        self.lr = lr
        self._muon = Muon(stack, lr * muon_multiplier, lr * WEIGHT_DECAY, matrices) if muon_multiplier else None
        ranges = _others(stack, matrices if muon_multiplier else {})
        parts = [(w, a, b) for w in range(stack.nodes) for a, b in ranges]
        self._adamw = adamw(
            [stack.theta[w, a:b].detach() for w, a, b in parts], [stack.gradient[w, a:b] for w, a, b in parts], lr
        )

    def step(self, factor: float) -> None:
        """One step of every node at `factor` times the learning rate."""
        for group in self._adamw.param_groups:
            group["lr"] = self.lr * factor
        self._adamw.step()
        if self._muon is not None:
            self._muon.step(factor)


def _others(stack: Stack, matrices: Mapping[str, int]) -> list[tuple[int, int]]:
    """Ranges [start, stop) of the flat vector that hold no matrix of Muon's; neighbours joined."""
    ranges: list[tuple[int, int]] = []
    place = 0
    for tensor in stack.layout.of_fragment(0):
        stop = place + tensor.element_count
        if not _pieces(tensor.name, matrices):
            joined = bool(ranges) and ranges[-1][1] == place
            ranges[-1:] = [(ranges[-1][0], stop)] if joined else [*ranges[-1:], (place, stop)]
        place = stop
    return ranges


def _pieces(name: str, matrices: Mapping[str, int]) -> int:
    """Into how many matrices a tensor is cut for Muon; 0: it is not one of Muon's."""
    return next((pieces for end, pieces in matrices.items() if name.endswith(f".{end}")), 0)


class Muon:
    """Muon over the matrices of all nodes; each expert's count as matrices of their own."""

    def __init__(self, stack: Stack, lr: float, decay: float, matrices: Mapping[str, int]) -> None:
        """`decay`: learning rate x weight decay, at factor 1. `matrices`: name's end -> pieces."""
        self._lr, self._decay = lr, decay
        groups: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for tensor in stack.layout.of_fragment(0):
            pieces = _pieces(tensor.name, matrices)
            if pieces:
                theta = _as_wide(stack.weight(tensor.name), pieces)
                gradient = _as_wide(stack.weight_gradient(tensor.name), pieces)
                for pair in zip(theta, gradient, strict=True):
                    groups.setdefault(tuple(pair[0].shape[1:]), []).append(pair)
        self._groups = list(groups.values())
        self._momenta: list[Tensor | None] = [None] * len(self._groups)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at `factor` times the learning rate."""
        for number, group in enumerate(self._groups):
            gradient = torch.cat([g for _, g in group])
            momentum = self._momenta[number]
            momentum = torch.zeros_like(gradient) if momentum is None else momentum
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            self._momenta[number] = momentum
            update = orthogonal(gradient.lerp(momentum, MUON_MOMENTUM))
            scale = self._lr * factor * 0.2 * math.sqrt(max(update.shape[-2:]))
            for (theta, _), part in zip(group, update.split(len(group[0][0])), strict=True):
                theta.mul_(1 - self._decay * factor).add_(part, alpha=-scale)


def _as_wide(weight: Tensor, pieces: int) -> list[Tensor]:
    """Views [nodes, rows, columns] with rows <= columns of [nodes, (experts,) out, in], cut into pieces by rows."""
    experts = weight.unbind(dim=1) if weight.dim() == 4 else [weight]
    parts = [part for expert in experts for part in expert.chunk(pieces, dim=1)]
    return [part.transpose(1, 2) if part.shape[1] > part.shape[2] else part for part in parts]


def orthogonal(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon on [count, rows, columns], rows <= columns (source: torch.optim.Muon)."""
    a, b, c = NEWTON_SCHULZ
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x

"""`gradient` mode inside a worker: gradients are taken from the program's optimizer before it can step.

The program goes on as always (backward, clip, optimizer.step, zero_grad). Its optimizer only says which step to make:
the hub and all nodes make it themselves, with equal bits (ledger.stepping), from the mean of all nodes' gradients.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from ciuic.errors import TrainingLoopError
from ciuic.job import Job
from ciuic.ledger.layout import Layout, StepRule, make_layout
from ciuic.train.state import ModelState, views_of

FREEZE_AT = 0.2
"""Least progress at which 1-bit Adam freezes the second moment (arXiv 2102.02888 freezes after 15-25 %)."""


def freeze_at(warmup: float) -> float:
    """Progress at which it freezes: not before the warm-up of the learning rate is over.

    A mixture of experts that froze half-way through its warm-up lost 0.09 (`ciuic bench learning`).
    """
    return max(FREEZE_AT, warmup)


def stepping_layout(layout: Layout, job: Job, model: nn.Module, optimizer: Optimizer) -> Layout:
    """The layout with the step of `gradient` mode as the optimizer has it. Raises TrainingLoopError."""
    _check(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first = optimizer.param_groups[0]
    known: dict[str, tuple[float, float]] = {}
    for group in optimizer.param_groups:
        if (group["betas"], group["eps"]) != (first["betas"], first["eps"]):
            raise TrainingLoopError(
                "gradient mode needs the same betas and eps in all parameter groups", next="use one pair for all"
            )
        scale = _rate(group) / _rate(first) if _rate(first) else 1.0
        for parameter in group["params"]:
            if id(parameter) in names:
                known[names[id(parameter)]] = (scale, float(group["weight_decay"]))
    frozen = job.optim.optimizer == "1-bit-adam"
    beta1, beta2 = first["betas"]
    rule = StepRule(
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(first["eps"]),
        feedback=frozen,
        freeze_at=freeze_at(job.optim.warmup) if frozen else 1.0,
    )
    tensors = []
    for tensor in layout.tensors:
        scale, decay = known.get(tensor.name, (0.0, 0.0)) if tensor.trainable else (1.0, 0.0)
        tensors.append(msgspec.structs.replace(tensor, lr_scale=scale, weight_decay=decay))
    return make_layout(tensors, layout.fragment_count, rule)


def _rate(group: dict[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))


def _check(optimizer: Optimizer) -> None:
    is_adam = isinstance(optimizer, AdamW) or (
        isinstance(optimizer, Adam) and not any(group["weight_decay"] for group in optimizer.param_groups)
    )
    if not is_adam or any(group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups):
        raise TrainingLoopError(
            f"gradient mode cannot make the step of {type(optimizer).__name__}",
            cause="hub and nodes make the step themselves, and know AdamW (or Adam without weight decay), not amsgrad",
            next='use torch.optim.AdamW, or [sync] send = "pseudo_gradient", which takes any optimizer',
        )


class GradientTap:
    """Flat gradient of one rank's model, in the ledger's order; buffers hold base - theta."""

    def __init__(self, model: nn.Module, state: ModelState) -> None:
        """Raises TrainingLoopError for a sharded model."""
        if state.is_sharded:
            raise TrainingLoopError(
                "gradient mode does not work with a model that is sharded over the ranks of a node",
                next='use [nodes] sharding = "none", or [sync] send = "pseudo_gradient"',
            )
        self._state = state
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        layout = state.layout
        self._parts: list[list[Tensor]] = [
            [tensors[spec.name] for spec in layout.of_fragment(f)] for f in range(layout.fragment_count)
        ]
        counts = [sum(t.numel() for t in part) for part in self._parts]
        self._flat = torch.zeros(sum(counts), dtype=torch.float32)
        self._flats = list(self._flat.split(counts))
        self._views = [list(views_of(flat, part)) for flat, part in zip(self._flats, self._parts, strict=True)]
        shapes = [layout.fragment_shape(f) for f in range(layout.fragment_count)]
        self._buffer_starts = [shape.coded_count + shape.small_count for shape in shapes]

    @torch.no_grad()
    def take(self) -> None:
        """Copy all gradients (none counts as zero) and remove them: the optimizer's own step then changes nothing."""
        for part, views in zip(self._parts, self._views, strict=True):
            for tensor, view in zip(part, views, strict=True):
                if isinstance(tensor, nn.Parameter):
                    if tensor.grad is None:
                        view.zero_()
                    else:
                        view.copy_(tensor.grad)
                        tensor.grad = None

    @torch.no_grad()
    def of(self, fragment: int, base: Any) -> Any:
        """The vector to push [element_count], on the host; `base` of that fragment gives the buffers' movement."""
        theta = self._state.gather(fragment)
        host, start = self._flats[fragment].numpy(), self._buffer_starts[fragment]
        if start < len(host):
            host[start:] = base[start:] - self._state.vectors.to_host(theta)[start:]
        return host

    def clear(self) -> None:
        """There is no gradient: the next push moves nothing but by its momentum."""
        self._flat.zero_()

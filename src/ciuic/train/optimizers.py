"""Inner optimizers: what a job's [optim] asks for, and Muon for matrices with AdamW for the rest.

Measured (`ciuic bench learning`): Muon inside, at the same bytes, learns more than AdamW inside a ledger, and more than
AdamW under plain DDP.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from ciuic.errors import UsageError
from ciuic.job import Job
from ciuic.train.combined import CombinedOptimizer
from ciuic.train.muon import StackedMuon
from ciuic.train.tensors import EXPERTS, ROUTER

MUON_TIMES = 4.0
"""Rate of the matrices over that of the rest."""
_HEAD = re.compile(r"(^|\.)(lm_head|head|embed_out|output|output_layer|classifier|score)\.weight$")
Named = list[tuple[str, nn.Parameter]]


class MuonOptions(TypedDict, total=False):
    """Keyword arguments of muon_adamw beside the model and the rates."""

    momentum: float
    """Of Muon, with Nesterov; 0.9 when left out."""
    betas: tuple[float, float]
    """Of AdamW; (0.9, 0.99) when left out."""
    weight_decay: float
    """Decoupled, times `lr` per step for matrices too; 0.1 when left out. One-dimensional parameters have none."""
    adamw: Iterable[str]
    """Names of further parameters that AdamW should move, for example a head with an unusual name."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    adamw: Iterable[str] = ()


def muon_adamw(
    model: nn.Module, lr: float, muon_lr: float | None = None, **options: Unpack[MuonOptions]
) -> CombinedOptimizer:
    """Muon for the hidden matrices of a model, AdamW for the rest, as one optimizer.

    Muon (torch.optim.Muon, scaled so that the rms of an update is about 0.2 x rate) moves two-dimensional weights that
    are no embedding, no head and no router, and the matrices of experts that are stacked in one parameter. `muon_lr` is
    4 x `lr` when left out. Frozen parameters are left out.

    Raises UsageError for names in `adamw` that the model has not, and for rates that are not above 0.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"muon_adamw needs the model itself, not {type(model).__name__}",
            cause="names and modules tell matrices from embeddings and heads",
            next="muon_adamw(model, lr=...)",
        )
    known = _Options(**options)
    muon_lr = MUON_TIMES * lr if muon_lr is None else muon_lr
    for name, value in (("lr", lr), ("muon_lr", muon_lr)):
        if not value > 0:
            raise UsageError(f"{name} is {value}", next="give a learning rate above 0")
    matrices, stacks, rest = split_by_shape(model, tuple(known.adamw))
    decay = known.weight_decay * lr / muon_lr  # both multiply it with their rate: the decay is the same everywhere
    parts: list[Optimizer] = []
    if matrices:
        parts.append(
            torch.optim.Muon(
                [p for _, p in matrices],
                lr=muon_lr,
                momentum=known.momentum,
                weight_decay=decay,
                nesterov=True,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if stacks:
        parts.append(StackedMuon([p for _, p in stacks], lr=muon_lr, momentum=known.momentum, weight_decay=decay))
    groups = _decayed([p for _, p in rest], known.weight_decay)
    if groups:
        parts.append(torch.optim.AdamW(groups, lr=lr, betas=known.betas))
    return CombinedOptimizer(parts)


def split_by_shape(model: nn.Module, adamw: tuple[str, ...] = ()) -> tuple[Named, Named, Named]:
    """Trainable parameters as (matrices, stacks of expert matrices, the rest); `adamw` names more of the rest."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if unknown := sorted(set(adamw) - {name for name, _ in trained}):
        raise UsageError(
            f"the model has no trainable parameter {unknown[0]!r}",
            next="give names as model.named_parameters() has them",
        )
    outer = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    outer |= _heads(model)
    matrices: Named = []
    stacks: Named = []
    rest: Named = []
    for name, parameter in trained:
        is_rest = name in adamw or id(parameter) in outer or ROUTER.search(name) or _HEAD.search(name)
        if parameter.dim() == 2 and not is_rest:
            matrices.append((name, parameter))
        elif parameter.dim() == 3 and EXPERTS.search(name) and not is_rest:
            stacks.append((name, parameter))
        else:
            rest.append((name, parameter))
    return matrices, stacks, rest


def build_optimizer(job: Job, model: nn.Module) -> Optimizer:
    """What [optim] says, for the parameters that are trained. One-dimensional ones (norms, biases) do not decay."""
    optim = job.optim
    if optim.optimizer == "muon":
        return muon_adamw(
            model,
            optim.lr,
            optim.muon_lr,
            momentum=optim.momentum,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
        )
    groups = _decayed([p for p in model.parameters() if p.requires_grad], optim.weight_decay)
    if optim.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.momentum > 0)
    kind: Callable[..., Optimizer] = torch.optim.Adam if optim.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=optim.lr, betas=optim.betas)


def _heads(model: nn.Module) -> set[int]:
    """What a transformers model calls its output embeddings."""
    find = getattr(model, "get_output_embeddings", None)
    head: Any = find() if callable(find) else None
    return {id(head.weight)} if isinstance(getattr(head, "weight", None), nn.Parameter) else set()


def _decayed(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]

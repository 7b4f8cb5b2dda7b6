"""Reads from the graph of a loss how it was made: by which factors, over how many labels, by which reduction."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NODES_MAX = 64
PASSED = (
    "Clone",
    "View",
    "Reshape",
    "UnsafeView",
    "Alias",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Neg",
    "Select",
    "Add",
    "Sub",
    "Stack",
)
"""Operations through which a factor passes unchanged (up to its sign)."""
LOSSES = ("NllLoss", "MseLoss", "BinaryCrossEntropy", "SmoothL1Loss", "HuberLoss", "KlDiv", "L1Loss", "SoftMarginLoss")
SINK = "_DDPSinkBackward"
REDUCTIONS = ("", "mean", "sum")


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One constant on the way from the root to the reduction."""

    value: float
    """By what the loss was multiplied."""
    is_soft: bool
    """It may well be part of the loss itself: the mean of a few terms, a half by habit."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """The way from the root to the first reduction."""

    reduction: str = ""
    labels: int = 0
    factors: tuple[Factor, ...] = ()
    others: tuple[float, ...] = field(default=())
    """Factors on the ways to other terms of the loss."""

    @property
    def product(self) -> float:
        """Of the factors."""
        product = 1.0
        for factor in self.factors:
            product *= factor.value
        return product

    def divided(self, parts: int) -> int:
        """How often it was divided by a number: 0, 1 or 2; -1 when that cannot be told."""
        if not self.reduction or self.reduction == "sum":
            return -1
        wanted = 1.0 / parts
        same = [factor for factor in self.factors if _near(factor.value, wanted)]
        hard = sum(not factor.is_soft for factor in same)
        if hard >= 2 or _near(self.product, wanted**2):
            return 2 if hard >= 2 or not same else 1
        if same or _near(self.product, wanted) or any(_near(other, wanted) for other in self.others):
            return 1
        return 0 if _near(self.product, 1.0) else -1


def read_form(root: Tensor, *, safe_from: int) -> Form:
    """Follow the graph of a scalar loss. Nodes made before the sequence number `safe_from` are not opened: hooks on
    their saved tensors could compute again what a checkpoint left out."""
    found: list[Form] = []
    others: list[float] = []
    open_nodes: list[tuple[Any, tuple[Factor, ...]]] = [(_through_sink(root.grad_fn, root.output_nr), ())]
    for _ in range(NODES_MAX):
        if not open_nodes:
            break
        node, factors = open_nodes.pop()
        if node is None or node._sequence_nr() < safe_from:
            continue
        name = node.name()
        followers = [_through_sink(*pair) for pair in node.next_functions if pair[0] is not None]
        if name.startswith(("DivBackward", "MulBackward")) and len(followers) == 1:
            value = _scalar(node)
            if value is not None:
                factor = Factor(value=value, is_soft=_is_soft(node, followers[0], value))
                open_nodes.append((followers[0], (*factors, factor)))
                others.append(value)
                continue
        if name.startswith("MeanBackward") and followers and followers[0].name().startswith("Stack"):
            followers = [follower for follower, _ in followers[0].next_functions if follower is not None]
            factors = (*factors, Factor(value=1.0 / max(1, len(followers)), is_soft=True))
            open_nodes.extend((follower, factors) for follower in reversed(followers))
            continue
        reduction, labels = _reduction(name, node)
        if reduction:
            found.append(Form(reduction=reduction, labels=labels, factors=factors))
        elif name.startswith(PASSED):
            open_nodes.extend((follower, factors) for follower in reversed(followers))
    if not found:
        return Form(others=tuple(others))
    first = next((form for form in found if form.labels), found[0])
    return Form(reduction=first.reduction, labels=first.labels, factors=first.factors, others=tuple(others))


def _through_sink(node: Any, output: int) -> Any:
    """The outputs of a DDP pass through a node that has one input for each of them."""
    if node is not None and node.name() == SINK and output < len(node.next_functions):
        return node.next_functions[output][0]
    return node


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 1e-5 * abs(wanted)


def _scalar(node: Any) -> float | None:
    """The constant of a product or quotient: what the loss was multiplied by."""
    other = getattr(node, "_saved_other", None)
    if other is None:
        other = getattr(node, "_saved_self", None) if node.name().startswith("Mul") else None
    if type(other) is Tensor:
        if other.numel() != 1 or other.is_meta:
            return None
        other = other.item()
    if not isinstance(other, int | float):
        return None
    if node.name().startswith("Mul"):
        return float(other)
    return 1.0 / other if other else None


def _is_soft(node: Any, follower: Any, value: float) -> bool:
    is_mean_of_terms = follower.name().startswith(("Add", "Sub"))
    return is_mean_of_terms or (node.name().startswith("Mul") and value == 0.5)


def _reduction(name: str, node: Any) -> tuple[str, int]:
    """Mean or sum, and the labels that count where they are known."""
    if name.startswith("NllLoss"):
        reduction = REDUCTIONS[node._saved_reduction]
        return (reduction, _labels(node)) if reduction else ("", 0)
    if name.startswith(LOSSES):
        return REDUCTIONS[getattr(node, "_saved_reduction", 0)], 0
    if name.startswith("MeanBackward0"):
        return "mean", int(node._saved_self_sym_numel)
    if name.startswith("SumBackward0"):
        return "sum", 0
    return "", 0


def _labels(node: Any) -> int:
    target, ignored = node._saved_target, node._saved_ignore_index
    ignored = ignored - (1 << 64) if ignored >= 1 << 63 else ignored
    return int(torch.count_nonzero(target != ignored)) if type(target) is Tensor else 0

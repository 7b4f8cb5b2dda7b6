"""How many tokens reach which expert while a model trains: counted on each node, told to the hub with its pushes.

Two ways to see it, and both count what the experts are called with, whatever the router is like: stacked experts get
the indices of the chosen experts as one integer tensor beside the tokens (as in transformers), experts that are
modules of their own get just their tokens. Where neither is so the counts are not known.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ciuic.ledger.experts import Expert

_log = logging.getLogger("ciuic.train")


@dataclass(kw_only=True)
class _Layer:
    """The experts of one layer."""

    counts: Tensor
    """int64 [experts + 1] since the start, where the model is; the last place is for what is no expert."""
    is_known: bool = True
    handles: list[Any] = field(default_factory=list)


class RoutedTokens:
    """Counts while `model` itself runs forward in training mode, so what a checkpoint computes again counts once."""

    def __init__(self, model: nn.Module, experts: frozenset[Expert]) -> None:
        """`experts`: those to count (of the whole model)."""
        self._in_forward = False
        self._layers: dict[str, _Layer] = {}
        self._taken: dict[frozenset[Expert], tuple[int, dict[str, int]]] = {}
        for name in sorted({layer for layer, _ in experts}):
            count = max(index for layer, index in experts if layer == name) + 1
            self._layers[name] = self._watch(model.get_submodule(f"{name}.experts".lstrip(".")), count)
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def take(self, experts: frozenset[Expert]) -> int:
        """How often tokens reached these since they were last asked for; -1 when that is not known."""
        layers = {layer for layer, _ in experts}
        if not layers or not all(self._layers[layer].is_known for layer in layers):
            return -1
        counts = {layer: self._layers[layer].counts.tolist() for layer in layers}
        reached = sum(counts[layer][index] for layer, index in experts)
        totals = {layer: sum(found) for layer, found in counts.items()}
        before, totals_before = self._taken.get(experts, (0, {}))
        self._taken[experts] = (reached, totals)
        is_seen = all(total > totals_before.get(layer, 0) for layer, total in totals.items())
        return reached - before if is_seen else -1

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in [*self._handles, *(handle for layer in self._layers.values() for handle in layer.handles)]:
            handle.remove()

    def _watch(self, module: nn.Module, count: int) -> _Layer:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            layer = _Layer(counts=torch.zeros(count + 1, dtype=torch.int64))
            for index, expert in module.named_children():
                layer.handles.append(expert.register_forward_pre_hook(self._one(layer, int(index)), with_kwargs=True))
            return layer
        device = next(module.parameters()).device
        layer = _Layer(counts=torch.zeros(count + 1, dtype=torch.int64, device=device))
        layer.handles.append(module.register_forward_pre_hook(self._all(layer), with_kwargs=True))
        return layer

    def _one(self, layer: _Layer, index: int) -> Any:
        def count(expert: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            if self._in_forward and tokens is not None and tokens.dim():
                layer.counts[index] += tokens.numel() // tokens.shape[-1] if tokens.numel() else 0

        return count

    def _all(self, layer: _Layer) -> Any:
        def count(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (self._in_forward and layer.is_known):
                return
            chosen = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and _is_index(x)), None)
            if chosen is None:
                _log.warning("which experts get few tokens is not known: %s is not told", type(experts).__name__)
                layer.is_known = False
                return
            flat = chosen.detach().reshape(-1).to(layer.counts.device, torch.int64)
            flat = flat.clamp(0, len(layer.counts) - 1)  # what other ranks compute has a number past the last expert
            layer.counts.scatter_add_(0, flat, torch.ones_like(flat))

        return count

    def _enter(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._in_forward = model.training

    def _leave(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self._in_forward = False


def _is_index(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool

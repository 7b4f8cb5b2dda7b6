"""Parameters that were one, or should be one, and are two."""

import weakref
from typing import Any

from torch import Tensor, nn

from ciuic.doctor.probe.batches import sample
from ciuic.doctor.probe.checkpoint import tensor_key

ELEMENTS_MIN = 64
Broken = tuple[str, str, str]
"""Two names and how it is known."""


class Ties:
    """Looks at modules before and after a load, and at what training begins with."""

    def __init__(self) -> None:
        self._groups: list[tuple[str, ...]] = []
        self._broken: list[tuple[weakref.ref[nn.Module], tuple[str, ...]]] = []

    def before_load(self, module: nn.Module) -> None:
        """Which names are one parameter?"""
        by_id: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(parameter), []).append(name)
        self._groups = [tuple(names) for names in by_id.values() if len(names) > 1]

    def after_load(self, module: nn.Module) -> None:
        """Are they still?"""
        for names in self._groups:
            if _are_apart(module, names):
                self._broken.append((weakref.ref(module), names))
        self._groups = []

    def now(self, model: nn.Module) -> Broken | None:
        """What is apart when a model begins to train."""
        for reference, names in self._broken:
            module = reference()
            if module is not None and _are_apart(module, names) and _shares(module, model):
                return names[0], names[1], "load"
        return _by_config(model) or _by_value(model)


def _shares(module: nn.Module, model: nn.Module) -> bool:
    own = {id(each) for each in model.modules()}
    return any(id(each) in own for each in module.modules())


def _are_apart(module: nn.Module, names: tuple[str, ...]) -> bool:
    found = dict(module.named_parameters(remove_duplicate=False))
    return len({id(found[name]) for name in names if name in found}) > 1


def _by_config(model: nn.Module) -> Broken | None:
    """transformers: config.tie_word_embeddings."""
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False) is not True:
        return None
    ends = [getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    if not all(callable(end) for end in ends):
        return None
    one, other = (end() for end in ends)  # ty: ignore[not-callable]
    if type(one) is not nn.Embedding or type(other) is not nn.Linear or one.weight is other.weight:
        return None
    if one.weight.shape != other.weight.shape or not (one.weight.requires_grad and other.weight.requires_grad):
        return None
    return _name(model, one.weight), _name(model, other.weight), "config"


def _by_value(model: nn.Module) -> Broken | None:
    """An embedding and a linear layer that begin with the same values and are not one parameter."""
    embeddings = [m.weight for m in model.modules() if type(m) is nn.Embedding and m.weight.numel() >= ELEMENTS_MIN]
    if not embeddings:
        return None
    linear = [m.weight for m in model.modules() if type(m) is nn.Linear and m.weight.numel() >= ELEMENTS_MIN]
    for one in embeddings:
        for other in linear:
            if one is other or one.shape != other.shape or not (one.requires_grad and other.requires_grad):
                continue
            if _are_equal(one, other):
                return _name(model, one), _name(model, other), "values"
    return None


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if type(one) is not nn.Parameter or type(other) is not nn.Parameter or one.dtype != other.dtype:
        return False
    key = tensor_key(one)
    return key is not None and key == tensor_key(other) and bool((sample(one) == sample(other)).all())


def _name(model: nn.Module, parameter: Any) -> str:
    return next((name for name, each in model.named_parameters(remove_duplicate=False) if each is parameter), "")

"""How this rank computes: modes and settings of its modules. Ranks that train one model do it alike."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ciuic.doctor.facts_model import EVALUATION, LEFT_IN_EVALUATION, MANNER, MANNER_BYTES, TRAINING
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.record import Facts, Question

MODELS_MAX = 3
SETTINGS_EVERY = 8
"""Samples from one look at all settings to the next; modes are looked at in each."""
MODULES_TOLD = 1024
WITH_MODE = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.MultiheadAttention)
"""Modules of torch that compute something else in evaluation mode."""
TEXT_MAX = 100


@dataclass(eq=False, kw_only=True)
class _Seen:
    """Of one model."""

    known: list[tuple[str, weakref.ref[nn.Module]]]
    structure: bytes
    samples: int = 0
    settings: bytes = b""
    modes: bytes = b""
    """One byte for each module: 1 in training mode."""
    context: str = ""
    is_fresh: bool = False
    trained: bytes = b""
    """Modes of the last look at which the whole model was in training mode."""

    @property
    def modules(self) -> list[tuple[str, nn.Module | None]]:
        """Paths and modules; None for one that the program has let go."""
        return [(path, reference()) for path, reference in self.known]

    def left_in_evaluation(self) -> int:
        """Modules whose mode makes a difference, and has changed with that of the whole model."""
        if not self.trained or self.modes[0]:
            return 0
        pairs = zip(self.modules, self.trained, self.modes, strict=True)
        return sum(before and not now and isinstance(module, WITH_MODE) for (_, module), before, now in pairs)


class Manner(Part):
    """MANNER and LEFT_IN_EVALUATION of sampled steps, and the texts behind it when somebody asks."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._seen: dict[int, _Seen] = {}

    def forward_begin(self, model: Model, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The first one of a sampled step, in training: with gradients, in whatever mode the modules are."""
        if model.index >= MODELS_MAX or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if not self.probe.sampler.due(self.probe.step + 1):
            return
        seen = self._seen.get(model.index)
        if seen is None:
            seen = self._seen[model.index] = _first_look(model.module)
        if seen.is_fresh:
            return
        seen.is_fresh = True
        seen.modes = bytes(module is not None and module.training for _, module in seen.modules)
        if seen.modes[0]:
            seen.trained = seen.modes
        seen.context = _context(inputs, keywords)
        if seen.samples % SETTINGS_EVERY == 0:
            seen.settings = _digest("".join(_text(module) for _, module in seen.modules).encode())
        seen.samples += 1

    def before_step(self, step: Step) -> None:
        """What was seen since the last sample."""
        if step.index or not step.due:
            return
        found = []
        for index, seen in self._seen.items():
            if seen.is_fresh:
                state = seen.modes + seen.context.encode() + seen.settings
                found.append([index, seen.structure, _digest(state)])
        if found:
            step.facts[MANNER] = found
        left = sum(seen.left_in_evaluation() for seen in self._seen.values() if seen.is_fresh)
        if left:
            step.facts[LEFT_IN_EVALUATION] = left

    def after_step(self, step: Step) -> None:
        """A step ends."""
        if step.index == 0:
            for seen in self._seen.values():
                seen.is_fresh = False

    def answer(self, question: Question) -> Facts | None:
        """By path of the module: its settings and its mode; under the empty path what is around all of them."""
        if question.kind != MANNER:
            return None
        seen = self._seen.get(int(question.facts["model"]))
        if seen is None:
            return {}
        modes = zip(seen.modules, seen.modes, strict=True)
        told = {
            path: [_text(module)[:TEXT_MAX], TRAINING if mode else EVALUATION]
            for (path, module), mode in list(modes)[:MODULES_TOLD]
        }
        return {"modules": told, "context": seen.context}


def _first_look(module: nn.Module) -> _Seen:
    modules = list(module.named_modules())
    names = ";".join(f"{path} {type(each).__name__}" for path, each in modules)
    return _Seen(known=[(path, weakref.ref(each)) for path, each in modules], structure=_digest(names.encode()))


def _context(inputs: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """What is around a forward pass and changes its numbers."""
    given = (*inputs, *keywords.values())
    device = next((item.device.type for item in given if isinstance(item, Tensor)), "cpu")
    autocast = "off"
    if torch.is_autocast_enabled(device):
        autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return f"autocast {autocast}"


def _text(module: nn.Module | None) -> str:
    """Class and settings of torch's own modules; what others say about themselves may hold anything."""
    if module is None:
        return ""
    name = type(module).__name__
    return f"{name}({module.extra_repr()})" if type(module).__module__.startswith("torch.nn.") else name


def _digest(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)[:MANNER_BYTES]

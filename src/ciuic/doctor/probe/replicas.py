"""Digests of parameters, gradients and buffers, for replicas that must be equal."""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ciuic.doctor.case import REPLICAS
from ciuic.doctor.facts import BUFFERS, CHILDREN, GRADIENTS, KINDS, PARAMETERS
from ciuic.doctor.facts_model import EVALUATED, MODE, MODEL, OPTIMIZER_STATE, SKETCH
from ciuic.doctor.probe.digests import DIGEST_BYTES, children, digest, leaves, root
from ciuic.doctor.probe.named import (
    comparable,
    is_distributed,
    mode_of,
    models_of,
    named_parameters,
    own_parameters,
    persistent_buffers,
)
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.probe.sketches import describe, fold
from ciuic.doctor.record import Facts, Question

STEPS_HELD = 8
"""Sampled steps whose digests are kept for questions."""
SKETCHES_HELD = 3
STATE_ELEMENTS = 64
STATE_PARAMETERS = 64
NAMES_ASKED_MAX = 32
EVALUATIONS_CLOSE = 16
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that a training forward pass does not use."""
ANSWERED = (*KINDS, EVALUATED)
Held = dict[str, dict[str, bytes]]


class Replicas(Part):
    """Roots into the record; levels of the tree and sketches as answers."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._held: dict[tuple[int, int], Held] = {}
        self._folds: dict[tuple[int, int], dict[str, dict[str, Tensor | None]]] = {}
        self._buffers: dict[int, dict[str, bytes]] = {}
        self._modes: dict[int, str] = {}
        self._evaluations: dict[int, int] = {}
        self._is_training = True

    def model_found(self, model: Model) -> None:
        """Tell what it is."""
        options = {}
        for name in ("forward_sync_buffers", "find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
            if model.wrapper is not None and hasattr(model.wrapper, name):
                options[name] = int(bool(getattr(model.wrapper, name)))
        self.probe.note(MODEL, index=model.index, name=model.name, model_kind=model.kind, **options)
        self._modes.clear()

    def forward_begin(self, model: Model, inputs: Any, keywords: Any) -> None:
        """Buffers are equal over DDP's ranks only here: right after its broadcast, before BatchNorm counts a batch."""
        if torch.is_grad_enabled():
            self._is_training = True
            if model.forwards == 1 and self.probe.sampler.due(self.probe.step + 1):
                self._buffers[model.index] = leaves(_must_be_equal(model).items())
        elif self._is_training and not model.module.training:
            self._is_training = False
            self._evaluate(model)

    def before_step(self, step: Step) -> None:
        """Of due steps."""
        if not step.due:
            return
        step.facts[MODE] = self._mode(step)
        if not is_distributed() or step.index in self.probe.tools:
            return
        named, ranks = self._named(step)
        found: Held = {}
        folds: dict[str, Any] = {}
        found[PARAMETERS], folds[PARAMETERS] = _look(named)
        if not step.closure:
            self._gradients(step, named, found, folds)
        if any(self._buffers.values()):
            found[BUFFERS] = {name: value for held in self._buffers.values() for name, value in held.items()}
        step.facts[OPTIMIZER_STATE] = _state_digest(step.optimizer)
        self._keep(step, found, folds, ranks)

    def after_step(self, step: Step) -> None:
        """Gradients of a closure are there only now."""
        if step.due and step.closure and step.taken and (step.index, step.number) in self._held:
            named, ranks = self._named(step)
            found, folds = self._held[step.index, step.number], self._folds[step.index, step.number]
            self._gradients(step, named, found, folds)
            self._keep(step, found, folds, ranks)

    def answer(self, question: Question) -> Facts | None:
        """Digests of one level, or sketches."""
        facts = question.facts
        if question.kind == CHILDREN and facts["of"] in ANSWERED:
            held = self._held.get((facts["optimizer"], facts["step"]), {}).get(facts["of"])
            return {} if held is None else children(held, facts["path"])
        if question.kind == SKETCH:
            folds = self._folds.get((facts["optimizer"], facts["step"]), {}).get(facts["of"], {})
            known = {name: folds.get(name) for name in list(facts["names"])[:NAMES_ASKED_MAX]}
            return {name: describe(folded) for name, folded in known.items() if folded is not None}
        return None

    def _named(self, step: Step) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
        others = self.probe.others(step.index)
        return comparable(named_parameters(step.optimizer, self.probe.models, others))

    def _mode(self, step: Step) -> str:
        if step.index not in self._modes:
            self._modes[step.index] = mode_of(models_of(step.optimizer, self.probe.models))
        return self._modes[step.index]

    def _gradients(self, step: Step, named: dict[str, Tensor], found: Held, folds: dict[str, Any]) -> None:
        own = {id(parameter) for parameter in own_parameters(step.optimizer)}
        gradients = {name: tensor.grad for name, tensor in named.items() if id(tensor) in own}
        found[GRADIENTS], folds[GRADIENTS] = _look(gradients)

    def _evaluate(self, model: Model) -> None:
        count = self._evaluations[model.index] = self._evaluations.get(model.index, 0) + 1
        if not is_distributed() or (count > EVALUATIONS_CLOSE and count % EVALUATIONS_CLOSE):
            return
        buffers = persistent_buffers(model.module)
        if buffers:
            digests = leaves(buffers.items())
            self._held[-1 - model.index, count] = {EVALUATED: digests}
            self._forget()
            self.probe.note(EVALUATED, model=model.index, count=count, buffers=root(digests))

    def _keep(self, step: Step, found: Held, folds: dict[str, Any], ranks: tuple[int, ...] | None) -> None:
        self._held[step.index, step.number] = found
        self._folds[step.index, step.number] = folds
        self._forget()
        for kind in KINDS:
            if found.get(kind):
                step.facts[kind] = root(found[kind])
        if ranks is None:
            ranks = next((model.ranks for model in self.probe.models if model.ranks), ())
        if ranks and len(ranks) < self.probe.world:
            step.facts[REPLICAS] = list(ranks)

    def _forget(self) -> None:
        while len(self._held) > STEPS_HELD:
            self._held.pop(next(iter(self._held)))
        while len(self._folds) > SKETCHES_HELD:
            self._folds.pop(next(iter(self._folds)))


def _look(named: Mapping[str, Tensor | None]) -> tuple[dict[str, bytes], dict[str, Tensor | None]]:
    """Digests and folds. One tensor after the other: the second look at it finds it in the processor's cache."""
    digests, folds = {}, {}
    for name, tensor in named.items():
        digests[name], folds[name] = digest(tensor), fold(tensor)
    return digests, folds


def _must_be_equal(model: Model) -> dict[str, Tensor]:
    """All buffers after a broadcast; else those that are no statistics and hold floating numbers."""
    buffers = persistent_buffers(model.module)
    wrapper = model.wrapper
    if wrapper is not None and model.wrapper_forwards and getattr(wrapper, "will_sync_module_buffers", bool)():
        return buffers
    return {
        name: buffer
        for name, buffer in buffers.items()
        if name.rpartition(".")[2] not in STATISTICS and buffer.is_floating_point()
    }


def _state_digest(optimizer: Optimizer) -> bytes:
    """Of the first elements of each tensor of the state, of parameters spread over the optimizer."""
    own = own_parameters(optimizer)
    state = xxhash.xxh3_64()
    for parameter in own[:: max(1, len(own) // STATE_PARAMETERS)]:
        values = optimizer.state.get(parameter)
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                sample = local.detach().reshape(-1)[:STATE_ELEMENTS].contiguous().cpu()
                state.update(sample.view(torch.uint8).numpy() if sample.numel() else b"")
            elif isinstance(value, int | float):
                state.update(repr(value).encode())
    return state.digest()[:DIGEST_BYTES]

"""Digests of parameters, gradients and buffers, for replicas that must be equal."""

from typing import Any

from torch import Tensor

from ciuic.doctor.case import REPLICAS
from ciuic.doctor.facts import BUFFERS, CHILDREN, GRADIENTS, KINDS, PARAMETERS
from ciuic.doctor.probe.digests import children, leaves, root
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.record import Facts, Question

STEPS_HELD = 8
"""Sampled steps whose digests are kept for questions."""


class Replicas(Part):
    """Roots into the record; levels of the tree as answers."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._held: dict[tuple[int, int], dict[str, dict[str, bytes]]] = {}
        self._buffers: dict[int, dict[str, bytes]] = {}

    def forward_begin(self, model: Model, inputs: Any, keywords: Any) -> None:
        """Buffers are equal over DDP's ranks only here: right after its broadcast, before BatchNorm counts a batch."""
        if model.forwards == 1 and self.probe.sampler.due(self.probe.step + 1):
            self._buffers[model.index] = leaves(model.buffers())

    def before_step(self, step: Step) -> None:
        if not step.due:
            return
        named = self._named(step)
        found = {PARAMETERS: leaves(named.items())}
        if not step.closure:
            found[GRADIENTS] = leaves((name, parameter.grad) for name, parameter in named.items())
        found[BUFFERS] = {name: value for held in self._buffers.values() for name, value in held.items()}
        self._keep(step, found)

    def after_step(self, step: Step) -> None:
        if step.due and step.closure and step.taken:
            named = self._named(step)
            gradients = leaves((name, parameter.grad) for name, parameter in named.items())
            self._keep(step, {**self._held[step.index, step.number], GRADIENTS: gradients})

    def answer(self, question: Question) -> Facts | None:
        if question.kind != CHILDREN:
            return None
        facts = question.facts
        held = self._held.get((facts["optimizer"], facts["step"]), {}).get(facts["of"])
        return {} if held is None else children(held, facts["path"])

    def _named(self, step: Step) -> dict[str, Tensor]:
        """Parameters of the models that this optimizer trains, and strangers among its own as `optimizer.<number>`."""
        own = [parameter for group in step.optimizer.param_groups for parameter in group["params"]]
        ids = {id(parameter) for parameter in own}
        named: dict[str, Tensor] = {}
        for model in self.probe.models:
            pairs = list(model.parameters())
            if any(id(parameter) in ids for _, parameter in pairs):
                named.update(pairs)
        known = {id(parameter) for parameter in named.values()}
        for at, parameter in enumerate(own):
            if id(parameter) not in known:
                named[f"optimizer.{at}"] = parameter
        return named

    def _keep(self, step: Step, found: dict[str, dict[str, bytes]]) -> None:
        self._held[step.index, step.number] = found
        while len(self._held) > STEPS_HELD:
            self._held.pop(next(iter(self._held)))
        for kind in KINDS:
            if kind in found:
                step.facts[kind] = root(found[kind])
        ranks = next((model.ranks for model in self.probe.models if model.ranks), ())
        if ranks:
            step.facts[REPLICAS] = list(ranks)

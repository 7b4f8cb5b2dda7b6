"""Does the optimizer own the model, and do its parameters get gradients? Names by notice, counts in the record."""

import gc
import weakref
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ciuic.doctor.facts_model import (
    CUT,
    CUT_NAMES,
    FROZEN,
    IDLE_NAMES,
    NONE_SET,
    OWNED,
    REENTRANT_NAMES,
    SHARED,
    STRANGERS,
    UNOWNED,
    WITHOUT_GRADIENT,
)
from ciuic.doctor.probe.called import Called
from ciuic.doctor.probe.named import STRANGER, has_memory, models_of, names_of, own_parameters
from ciuic.doctor.probe.namesake import Names
from ciuic.doctor.probe.part import Model, Part, Step

ELEMENTS = 16
"""Of a parameter that no optimizer owns: are they still what they were?"""


class Ownership(Part):
    """Of each sampled step."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._names = Names(probe)
        self._called = Called(probe)
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """That have made no step so far; not held: a program may let them go."""
        self._searched: int = 0
        self._seen: dict[tuple[int, int], int] = {}
        self._backwards = 0
        self._used_at: dict[int, int] = {}
        self._open: list[int] = []
        self._frozen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By optimizer: parameters that need no gradient and have one, and a few elements of each before the step."""
        self._values: dict[str, Tensor] = {}
        self._moved: set[str] = set()
        self._gradients: dict[str, tuple[int, Tensor]] = {}

    def optimizer_found(self, optimizer: Optimizer, index: int) -> None:
        """Watch the module calls of the steps that are sampled, from the next on."""
        self._called.begin()

    def forward_begin(self, model: Model, inputs: Any, keywords: Any) -> None:
        """The first forward pass comes before the first optimizer step."""
        if torch.is_grad_enabled():
            self._called.training_pass()
            if self.probe.step == 0:
                self._called.begin()

    def backward_end(self, roots: tuple[Tensor, ...]) -> None:
        """Count."""
        self._backwards += 1

    def before_step(self, step: Step) -> None:
        """Look, when gradients belong to this step already."""
        self._open.append(step.index)
        self._frozen.pop(step.index, None)
        if step.due:
            own = own_parameters(step.optimizer)
            frozen = [p for p in own if not p.requires_grad and p.grad is not None and has_memory(p)]
            self._frozen[step.index] = [(parameter, _few(parameter).clone()) for parameter in frozen]
        if step.due and not step.closure:
            self._look(step)

    def after_step(self, step: Step) -> None:
        """Look, when a closure has made them; then get ready for the next sample."""
        if step.due and step.closure:
            self._look(step)
        if step.due and step.taken:
            moved = [p for p, few in self._frozen.pop(step.index, ()) if not torch.equal(_few(p), few)]
            if moved:
                names = names_of(self.probe.models)
                step.facts[FROZEN] = len(moved)
                self._names.tell(step, FROZEN, [names.get(id(p), STRANGER) for p in moved])
        self._used_at[step.index] = self._backwards
        if step.index in self._open:
            self._open.remove(step.index)
        if step.index == 0:
            if self.probe.sampler.due(step.number + 1):
                self._called.begin()
            else:
                self._called.end()

    def ends(self) -> dict[str, Any]:
        """Take the hook away."""
        self._called.end()
        return {}

    def _look(self, step: Step) -> None:
        models = models_of(step.optimizer, self.probe.models)
        names = names_of(models)
        own = own_parameters(step.optimizer)
        trainable = [parameter for parameter in own if parameter.requires_grad]
        bare = [names.get(id(p), f"{STRANGER}.{at}") for at, p in enumerate(own) if _lacks(p)]
        unowned = self._that_stay(self._unowned(step))
        strangers = [p for p in trainable if id(p) not in names and p.grad is None]
        if unowned and not strangers:  # an optimizer of a copy: all that it owns is without a gradient
            strangers = [p for p in trainable if p.grad is None] if len(bare) == len(trainable) else []
        twice = len(own) - len({id(parameter) for parameter in own})
        step.facts[OWNED] = [len(trainable), len(bare), 0, len(unowned), len(strangers), twice]
        if bare:
            step.facts[NONE_SET] = xxhash.xxh3_64("\n".join(bare).encode()).digest()
        self._names.tell(step, WITHOUT_GRADIENT, bare)
        self._names.tell(step, UNOWNED, list(unowned))
        shapes = {tuple(parameter.shape) for parameter in strangers}
        same = [name for name, parameter in unowned.items() if tuple(parameter.shape) in shapes]
        self._names.tell(step, STRANGERS, same if strangers else [], strangers=len(strangers))
        self._cut(step, models, {id(parameter) for parameter in trainable}, names)
        self._shared(step, own, names)

    def _unowned(self, step: Step) -> dict[str, Tensor]:
        """Trainable, with a gradient, and no optimizer has it. Whether there are optimizers that never step is
        looked up
        when it matters."""
        found = self._not_in([*self.probe.optimizers, *self._others])
        if found and len(found) != self._searched:
            self._others = weakref.WeakSet(
                item for item in gc.get_objects() if issubclass(type(item), Optimizer) and hasattr(item, "param_groups")
            )
            found = self._not_in([*self.probe.optimizers, *self._others])
            self._searched = len(found)
        return found

    def _that_stay(self, unowned: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without those that somebody else moves: a master copy that is written back."""
        unowned = {name: p for name, p in unowned.items() if self._is_fresh(name, p.grad)}
        few = {name: _few(parameter) for name, parameter in unowned.items() if has_memory(parameter)}
        last, self._values = self._values, {name: value.clone() for name, value in few.items()}
        self._moved.update(name for name, value in few.items() if name in last and not torch.equal(last[name], value))
        return {name: parameter for name, parameter in unowned.items() if name not in self._moved}

    def _is_fresh(self, name: str, gradient: Tensor | None) -> bool:
        """Not the same as at the last look: what was trained before, by something else, keeps its gradients."""
        if gradient is None or gradient.layout is not torch.strided:
            return False
        few = _few(gradient)
        version, values = self._gradients.get(name, (-1, few))
        self._gradients[name] = gradient._version, few.clone()
        return version != gradient._version or not torch.equal(values, few)

    def _not_in(self, optimizers: list[Optimizer]) -> dict[str, Tensor]:
        owned = {id(parameter) for optimizer in optimizers for parameter in own_parameters(optimizer)}
        names = names_of(self.probe.models)
        return {
            names[id(parameter)]: parameter
            for model in self.probe.models
            for _, parameter in model.parameters()
            if parameter.requires_grad and parameter.grad is not None and id(parameter) not in owned
        }

    def _cut(self, step: Step, models: list[Model], own: set[int], names: dict[int, str]) -> None:
        """Parameters without a gradient, by whether their module was called."""
        cut, reentrant, idle = [], [], []
        for model in models:
            for module in model.module.modules():
                direct = [p for p in module._parameters.values() if p is not None and p.requires_grad and id(p) in own]
                missing = [names[id(p)] for p in direct if _lacks(p) and id(p) in names]
                if not missing:
                    continue
                how = self._called.how(module) if len(missing) == len(direct) and _is_leaf(module) else ""
                (reentrant if how == "reentrant" else cut if how == "called" else idle).extend(missing)
        if self._called.is_watching:
            step.facts[CUT] = [len(cut), len(reentrant), len(idle)]
            self._names.tell(step, CUT_NAMES, cut)
            self._names.tell(step, REENTRANT_NAMES, reentrant)
            self._names.tell(step, IDLE_NAMES, idle)

    def _shared(self, step: Step, own: list[Tensor], names: dict[int, str]) -> None:
        ids = {id(parameter) for parameter in own if parameter.grad is not None}
        for index, other in enumerate(self.probe.optimizers):
            if index == step.index or index in self.probe.tools or step.index in self.probe.tools:
                continue
            both = [parameter for parameter in own_parameters(other) if id(parameter) in ids]
            before = self._seen.get((step.index, index), -1)
            number = self.probe.number_of(index)
            self._seen[step.index, index] = number
            if both and before >= 0 and number > before:
                same = int(self._used_at.get(index) == self._backwards)
                told = [names.get(id(parameter), STRANGER) for parameter in both]
                self._names.tell(step, SHARED, told, other=index, same=same)


def _lacks(parameter: Tensor) -> bool:
    """Whether it should have a gradient and has none. A shard may have no element."""
    return parameter.requires_grad and parameter.grad is None and parameter.numel() > 0


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _few(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // ELEMENTS))]

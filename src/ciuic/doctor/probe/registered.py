"""What DDP registered when the model was wrapped, and what is trainable now."""

from typing import Any

from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from ciuic.doctor.facts_model import UNREGISTERED
from ciuic.doctor.probe.named import models_of, names_of, own_parameters
from ciuic.doctor.probe.namesake import Names
from ciuic.doctor.probe.part import Model, Part, Step

HOOKS_STEPS = 3
"""Up to this step each parameter's hook is looked up: that costs some microseconds."""
UNFROZEN, ADDED, IGNORED, LOST, BESIDE = "unfrozen", "added", "ignored", "hooks lost", "beside"


class _Wrap:
    """One DDP, at the moment when it was made."""

    def __init__(self, model: Model) -> None:
        ignored = set(getattr(model.wrapper, "parameters_to_ignore", ()))
        parameters = dict(model.module.named_parameters())
        self.ignored = {id(parameter) for name, parameter in parameters.items() if name in ignored}
        self.known = {
            id(parameter): parameter for parameter in parameters.values()
        }  # kept, so that no id is used again
        self.registered = {id(p) for p in parameters.values() if p.requires_grad} - self.ignored
        self.nodes: dict[int, Any] = {id(p): get_gradient_edge(p).node for p in parameters.values() if p.requires_grad}


class Registered(Part):
    """UNREGISTERED notices: parameters that are trainable, have a gradient, and that DDP will never reduce."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._wraps: dict[int, _Wrap] = {}
        self._names = Names(probe)

    def model_found(self, model: Model) -> None:
        """Right after the wrap."""
        if model.wrapper is not None:
            self._wraps[model.index] = _Wrap(model)

    def before_step(self, step: Step) -> None:
        """Of sampled steps."""
        if step.due and self._wraps:
            found: dict[str, str] = {}
            for model in self.probe.models:
                wrap = self._wraps.get(model.index)
                if wrap is not None:
                    found.update(_compare(model, wrap, deep=step.number <= HOOKS_STEPS))
            found.update(self._beside(step))
            if step.number > HOOKS_STEPS and not found:
                return  # what was told of hooks stays true
            self._names.tell(step, UNREGISTERED, list(found), how=sorted(set(found.values())))

    def _beside(self, step: Step) -> dict[str, str]:
        """What the optimizer trains outside of every wrapper, while it trains something inside one too."""
        models = models_of(step.optimizer, self.probe.models)
        if all(model.wrapper is None for model in models):
            return {}
        inside = {id(p) for model in models if model.wrapper is not None for _, p in model.parameters()}
        names = names_of(models)
        own = [p for p in own_parameters(step.optimizer) if p.requires_grad and not isinstance(p, DTensor)]
        return {names[id(p)]: BESIDE for p in own if id(p) in names and id(p) not in inside}


def _compare(model: Model, wrap: _Wrap, *, deep: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        key = id(parameter)
        if key in wrap.ignored:
            found[name] = IGNORED
        elif key not in wrap.known:
            found[name] = ADDED
        elif key not in wrap.registered:
            found[name] = UNFROZEN
        elif deep and get_gradient_edge(parameter).node is not wrap.nodes.get(key):
            found[name] = LOST
    return found

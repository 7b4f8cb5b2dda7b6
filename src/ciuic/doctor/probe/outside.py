"""Parameters that were written to between two steps: by hand, by a load, by an averaging."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ciuic.doctor.facts_model import NAMES, NAMES_MAX, OUTSIDE, WRITTEN
from ciuic.doctor.probe.named import has_memory, is_distributed, named_parameters
from ciuic.doctor.probe.namesake import NAME_CHARACTERS_MAX
from ciuic.doctor.probe.part import Model, Part, Step

NOTICES_CLOSE = 8
"""So many are told at once, later ones only at sampled steps."""
PARAMETERS_MAX = 1024
ELEMENTS = 16


class Outside(Part):
    """Compares torch's own count of writes at the end of a step with the one before the next; and, after a sampled
    step,
    a few elements, because `.data` is not counted."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._named: dict[int, dict[str, Tensor]] = {}
        self._versions: dict[int, list[int]] = {}
        self._values: dict[int, list[Tensor]] = {}
        self._times: dict[int, int] = {}
        self._told = 0
        self._loaded = False

    def model_found(self, model: Model) -> None:
        """Others may be trained now."""
        self._named.clear()
        self._versions.clear()

    def optimizer_found(self, optimizer: Optimizer, index: int) -> None:
        """Some of the parameters may be its own."""
        self._named.clear()
        self._versions.clear()

    def optimizer_replaced(self, index: int, heir: int) -> None:
        """What it has moved so far was no write from outside."""
        self._named.clear()
        self._versions.clear()

    def loaded(self, target: Any, state: Any, result: Any) -> None:
        """The likely writer."""
        self._loaded = self._loaded or isinstance(target, nn.Module)

    def before_step(self, step: Step) -> None:
        """Was anything written since?"""
        if is_distributed():
            self._look(step)
        if step.due and self._times.get(step.index):
            step.facts[OUTSIDE] = self._times.pop(step.index)

    def after_step(self, step: Step) -> None:
        """From here on, writes come from outside."""
        if not is_distributed():
            return
        if step.due or step.index not in self._named:
            named = named_parameters(step.optimizer, self.probe.models, self.probe.others(step.index))
            self._named[step.index] = dict(list(named.items())[:PARAMETERS_MAX])
        tensors = self._named[step.index].values()
        self._versions[step.index] = [tensor._version for tensor in tensors]
        self._values.pop(step.index, None)
        if step.due:
            self._values[step.index] = [_few(tensor).clone() for tensor in tensors]
        self._loaded = False

    def _look(self, step: Step) -> None:
        before = self._versions.pop(step.index, None)
        named = self._named.get(step.index)
        if before is None or named is None:
            return
        written = [name for (name, tensor), seen in zip(named.items(), before, strict=True) if tensor._version != seen]
        values = self._values.pop(step.index, None)
        if values is not None and not written:
            pairs = zip(named.items(), values, strict=True)
            written = [name for (name, tensor), value in pairs if not _same(_few(tensor), value)]
        if not written:
            return
        self._times[step.index] = self._times.get(step.index, 0) + 1
        if self._told < NOTICES_CLOSE or step.due:
            self._told += 1
            names = [name[:NAME_CHARACTERS_MAX] for name in written[:NAMES_MAX]]
            by = "load_state_dict" if self._loaded else ""
            facts = {"what": WRITTEN, "optimizer": step.index, "number": step.number, "count": len(written), "by": by}
            self.probe.note(NAMES, names=names, **facts)


def _few(tensor: Tensor) -> Tensor:
    if not has_memory(tensor):
        return torch.empty(0)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // ELEMENTS))]


def _same(now: Tensor, then: Tensor) -> bool:
    return now.shape == then.shape and bool(((now == then) | (now != now)).all())  # NaN is not news

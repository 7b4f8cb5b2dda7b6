"""Evidence about the scale of loss and gradients: micro-batches, constant factors, labels, manual reductions."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ciuic.doctor.facts_training import FORM, LOSS, PASSES, REDUCED, WITNESS
from ciuic.doctor.probe.lossgraph import Form, read_form
from ciuic.doctor.probe.part import Call, Model, Part, Step
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.spans import Spans
from ciuic.doctor.probe.stack import site
from ciuic.doctor.probe.witness import UNKNOWN, Witness

REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "reduce")
STEPS_READ = 20
"""The losses of so many first steps are all read: labels that differ by chance differ less often than that."""
PASSES_MAX = 1024
"""Since the last step, or since gradients were cleared: a program may do neither."""
NAME_MAX, SITE_MAX = 80, 60
CLIP_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ divides by the norm plus this."""


class LossScale(Part):
    """Looks closely in the window before each sampled step; counts always."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self.close = self._reads = True
        self._passes = 0
        self._losses: list[float] = []
        self._batches: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()
        self._loss: Tensor | None = None
        self._forms: dict[str, list[Form]] = {}
        self._forwards = 0
        self._divisors: list[float] = []
        self._reduced: dict[int, list[Any]] = {}
        self._averaged = False
        self._witnesses: dict[int, Witness] = {}
        self._spans: Spans | None = None

    # ---- losses ----------------------------------------------------------------------------------------------------

    def batch(self, loader: Any, batch: Any, wait_s: float) -> None:
        self._batches[id(loader)] += 1

    def scaled(self, scaler: Any, loss: Any) -> None:
        self._loss = loss if type(loss) is Tensor else None

    def forward_begin(self, model: Model, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._forwards += torch.is_grad_enabled()

    def backward_begin(self, roots: tuple[Tensor, ...]) -> None:
        self._passes += 1
        if not self._reads:
            self._loss = None
            return
        root = self._loss if self._loss is not None else roots[0] if len(roots) == 1 else None
        self._loss = None
        if root is None or type(root) is not Tensor or root.numel() != 1:
            return
        if self.close and len(self._losses) < PASSES_MAX:
            self._losses.append(root.item())
        if self.probe.packing == 0 and sum(map(len, self._forms.values())) < PASSES_MAX:
            form = read_form(root, safe_from=self.probe.packed_until)
            self._forms.setdefault(site(), []).append(form)

    def bucket(self, bucket: Any) -> None:
        for witness in self._witnesses.values() if self.close else ():
            witness.handed(bucket)

    def backward_end(self, roots: tuple[Tensor, ...]) -> None:
        if not self.close:
            return
        self._spans = None
        wrappers = [m.wrapper for m in self.probe.models if isinstance(m.wrapper, DistributedDataParallel)]
        if any(wrapper.require_backward_grad_sync for wrapper in wrappers):
            self._averaged = True
        for optimizer in self.probe.optimizers:
            self._witness(optimizer).produced()

    def zero_grad(self, owner: Any) -> None:
        self._forget(owner if isinstance(owner, Optimizer) else None)

    def optimizer_replaced(self, index: int, heir: int) -> None:
        self._witnesses.clear()
        if heir != index:
            self._steps[index] += self._steps.pop(heir, 0)

    # ---- what multiplies gradients ---------------------------------------------------------------------------------

    def clipped(self, parameters: list[Tensor], limit: float, norm: Any) -> None:
        if not self.close:
            return
        for witness in self._witnesses.values():
            if witness.parameter is not None and any(each is witness.parameter for each in parameters):
                size = as_number(norm)
                witness.multiplied(None if size == UNKNOWN else min(1.0, limit / (size + CLIP_EPSILON)))

    def unscaled(self, scaler: Any, optimizer: Optimizer) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if self.close and any(known is inner for known in self.probe.optimizers):
            self._witness(inner).multiplied(1.0 / max(1e-30, scaler.get_scale()))

    def collective_begin(self, call: Call) -> None:
        if not self.close or call.name not in REDUCTIONS or len(call.ranks) < 2:
            return
        if torch._C._current_graph_task_id() != -1:  # a communication hook of DDP
            return
        if self._spans is None:
            self._spans = Spans(self.probe.models)
        for tensor in call.tensors:
            hit = self._spans.find(tensor)
            if hit is None:
                continue
            model, name = hit
            known = self._reduced.get(model.index)
            if known is not None:
                known[0] += 1
                continue
            managed = model.wrapper is not None and self._averaged
            facts = [1, call.operation or "SUM", name[-NAME_MAX:], call.site[:SITE_MAX], int(managed), len(call.ranks)]
            self._reduced[model.index] = facts

    # ---- steps -----------------------------------------------------------------------------------------------------

    def before_step(self, step: Step) -> None:
        if step.due and not step.closure:
            self._tell(step)

    def after_step(self, step: Step) -> None:
        if step.due and step.closure:
            self._tell(step)
        elif not step.due and step.index == 0 and self._reads:
            self._form(step)
        if step.due:
            step.facts[PASSES] = self._passes
            if self._losses and step.index == 0:
                step.facts[LOSS] = sum(self._losses) / len(self._losses)
        self._steps[step.index] += 1
        if step.index == 0:
            if step.due:
                self._losses.clear()
            self._reduced.clear()
            self._averaged = False
            self.close = self.probe.sampler.due(step.number + 1)
            self._reads = self.close or step.number < STEPS_READ
        self._forget(step.optimizer)

    def _tell(self, step: Step) -> None:
        own = self._model(step.optimizer)
        found = self._witness(step.optimizer).used(own.kind if own is not None else "plain")
        if found is not None:
            step.facts[WITNESS] = found
        if own is not None and own.index in self._reduced:
            step.facts[REDUCED] = self._reduced[own.index]
        form = self._form(step)
        if form is not None:
            step.facts[FORM] = form

    def _form(self, step: Step) -> list[Any] | None:
        forms = max(self._forms.values(), key=len, default=[])
        if not forms:
            return None
        micro = min(len(forms), max(1, self._forwards))
        if self._batches and max(self._batches.values()) < micro * (self._steps[step.index] + 1):
            micro = 1  # several losses of one batch are not micro-batches
        last = forms[-1]
        counts = [form.labels for form in forms[-micro:]]
        labels = sum(counts) if all(counts) else 0
        product = sum(form.product for form in forms[-micro:]) / micro
        divided = last.divided(micro) if micro > 1 else -1
        if step.index == 0 and product > 0:
            divisor = labels / (micro * product) if last.reduction == "mean" else 1.0 / product
            known = [divisor, *self._divisors]
            self._divisors = [min(known), max(known)]
        facts = [micro, product, last.reduction, labels, divided, *self._divisors[:2]]
        if step.due:
            self._divisors = []
        return facts

    def _forget(self, optimizer: Optimizer | None) -> None:
        """What was accumulated is cleared or used."""
        if optimizer is None or not self.probe.optimizers or self._is_first(optimizer):
            self._forms.clear()
            self._forwards = 0

    def _is_first(self, optimizer: Optimizer) -> bool:
        """The first one, or one that has its parameters."""
        for index, known in enumerate(self.probe.optimizers):
            if known is optimizer:
                return index == 0 or self.probe.heirs.of(index) == 0
        return False

    def _witness(self, optimizer: Optimizer) -> Witness:
        index = self.probe.index_of(optimizer)
        return self._witnesses.setdefault(index, Witness(optimizer))

    def _model(self, optimizer: Optimizer) -> Model | None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = (m for m in self.probe.models if any(id(p) in own for _, p in m.parameters()))
        return next(found, None)


def as_number(value: Any) -> float:
    """A norm as a number; UNKNOWN for one that is spread over ranks."""
    if isinstance(value, DTensor):
        if any(not placement.is_replicate() for placement in value.placements):
            return UNKNOWN
        value = value.to_local()
    return float(value)

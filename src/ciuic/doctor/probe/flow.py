"""How gradients came about: forward passes around or through the wrapper, backward passes, and what the program
exchanged."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ciuic.doctor.facts_model import AFTER_STEP, ALONE, EXCHANGE, FLOW, UNTOUCHED
from ciuic.doctor.probe.compiled import has_compiled
from ciuic.doctor.probe.named import is_distributed, mode_of, models_of, names_of, own_parameters
from ciuic.doctor.probe.namesake import Names
from ciuic.doctor.probe.part import Call, Model, Part, Step

EXCHANGING = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
"""Calls, by the beginning of their name, that can make gradients or parameters equal."""
SHARE = 0.05
"""Of the elements of a model: smaller exchanges are metrics."""
ELEMENTS_MIN = 16
SITE_MAX = 60
SITES_MAX = 16
"""Places of the program whose collectives after a step are looked at."""
EXTRA_CLOSE = 4
"""So many steps after an exchange of parameters are sampled; then one after each ten exchanges."""


def _nobody() -> None:
    """In the place of a reference."""


def _memory(tensor: Tensor) -> int:
    """Where the memory begins that a tensor is in; 0: nowhere."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else 0


class _Count:
    """Of one optimizer."""

    def __init__(self) -> None:
        self.backwards = 0
        self.passes: dict[int, list[int]] = {}
        self.no_sync = 0
        self.exchanges = 0


class Flow(Part):
    """FLOW and EXCHANGE of each sampled step."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._since: dict[int, _Count] = {}
        self._backwards = self._no_sync = 0
        self._where = "start"
        self._elements = {"gradients": 0, "parameters": 0}
        self._is_late, self._has_stepped = False, False
        self._exchanges = 0
        self._size: int | None = None
        self._begun: dict[int, tuple[int, int]] | None = None
        self._untouched: dict[int, list[int]] = {}
        self._names = Names(probe)
        self._calls = 0
        """Collectives of several ranks, larger than metrics."""
        self._after_step: list[Any] = [0, ""]
        self._stepped: Callable[[], Optimizer | None] = _nobody
        """The last optimizer that has stepped."""
        self._of_gradients: dict[str, bool] = {}
        """By place of the program: whether what it exchanges after a step are gradients."""
        self._watch_no_sync()

    def _watch_no_sync(self) -> None:
        part, original = self, DistributedDataParallel.no_sync

        @contextlib.contextmanager
        def no_sync(wrapper: DistributedDataParallel) -> Iterator[None]:
            part._no_sync += 1
            with original(wrapper):
                yield

        self._patch = original, no_sync
        setattr(DistributedDataParallel, "no_sync", no_sync)  # noqa: B010 - its first parameter has another name

    def ends(self) -> dict[str, Any]:
        """Put back what was replaced."""
        original, ours = self._patch
        if DistributedDataParallel.no_sync is ours:
            DistributedDataParallel.no_sync = original
        return {}

    def model_found(self, model: Model) -> None:
        """Sizes have changed."""
        self._size = None

    def optimizer_replaced(self, index: int, heir: int) -> None:
        """Counts go on."""
        self._since[index] = self._since.pop(heir, _Count())

    # ---- passes --------------------------------------------------------------------------------------------

    def backward_begin(self, roots: tuple[Tensor, ...]) -> None:
        """A pass after an exchange of gradients adds to what was equal."""
        if self._where == "gradients":
            self._is_late = self._elements["gradients"] >= self._least()
        if self._where == "parameters":
            self._close_parameters()
        if self._has_stepped:  # by one optimizer or by several: all of them had the same gradients
            self._has_stepped, self._is_late = False, False
            self._elements["gradients"] = 0
        self._where = "backward"
        self._begun = self._snapshot() if self._is_close() else None

    def forward_begin(self, model: Model, inputs: Any, keywords: Any) -> None:
        """What is exchanged from here on is no parameters but features."""
        if self._where == "parameters" and torch.is_grad_enabled():
            self._close_parameters()
            self._where = "forward"

    def backward_end(self, roots: tuple[Tensor, ...]) -> None:
        """What comes now may exchange gradients."""
        self._backwards += 1
        self._where = "gradients"
        if self._begun is not None:
            now = self._snapshot()
            self._untouched = {0: [key for key, seen in now.items() if self._begun.get(key) == seen]}
            self._begun = None

    def collective_begin(self, call: Call) -> None:
        """Of one group of several ranks; inside a backward pass it is a hook's."""
        if len(call.ranks) < 2 or not call.name.startswith(EXCHANGING):
            return
        self._calls += any(tensor.numel() >= ELEMENTS_MIN for tensor in call.tensors)
        if self._where == "parameters" and self._is_of_gradients(call):
            self._after_step = [self._after_step[0] + sum(tensor.numel() for tensor in call.tensors), call.site]
        elif self._where in self._elements:
            self._elements[self._where] += sum(tensor.numel() for tensor in call.tensors)
            if self._where == "gradients" and self._elements["gradients"] >= self._least():
                self._is_late = False

    def _is_of_gradients(self, call: Call) -> bool:
        known = self._of_gradients.get(call.site)
        if known is None and len(self._of_gradients) < SITES_MAX:
            optimizer = self._stepped()
            own = own_parameters(optimizer) if optimizer is not None else []
            gradients = {_memory(parameter.grad) for parameter in own if parameter.grad is not None}
            known = self._of_gradients[call.site] = any(_memory(tensor) in gradients - {0} for tensor in call.tensors)
        return bool(known)

    # ---- steps ---------------------------------------------------------------------------------------------

    def before_step(self, step: Step) -> None:
        """Tell what has happened since this optimizer's last step."""
        if not step.due or step.closure:
            return
        self._tell(step)

    def after_step(self, step: Step) -> None:
        """Begin to count anew."""
        if step.due and step.closure:
            self._tell(step)
        count = self._since.setdefault(step.index, _Count())
        count.backwards, count.no_sync, count.exchanges = self._backwards, self._no_sync, self._exchanges
        count.passes = {model.index: list(model.passes) for model in self.probe.models}
        if step.index == 0:
            self._after_step = [0, ""]
        if self._where != "parameters":  # else between steps of two optimizers
            self._elements["parameters"] = 0
        self._where, self._has_stepped, self._stepped = "parameters", True, weakref.ref(step.optimizer)

    def _tell(self, step: Step) -> None:
        models = models_of(step.optimizer, self.probe.models)
        wrapped = [model for model in models if model.wrapper is not None] or models
        count = self._since.get(step.index, _Count())
        sums, last = [0, 0, 0], 1
        for model in wrapped:
            before = count.passes.get(model.index, [0, 0, 0, 0])
            sums = [total + now - then for total, now, then in zip(sums, model.passes, before, strict=False)]
            last = min(last, model.passes[3]) if model.passes[1] > before[1] else last
        no_sync, backwards = self._no_sync - count.no_sync, self._backwards - count.backwards
        if not any(sums) and has_compiled():  # compiled passes are not seen: taken to be as they should be
            sums = [backwards] * 3
        step.facts[FLOW] = [backwards, *sums, last, no_sync]
        exchanged = self._elements["gradients"] >= self._least(step.optimizer)
        if exchanged or self._exchanges or self._is_late:
            is_fresh = int(self._exchanges > count.exchanges)
            step.facts[EXCHANGE] = [int(exchanged), int(self._is_late), self._exchanges, is_fresh]
        if self._after_step[0] >= self._least(step.optimizer):
            step.facts[AFTER_STEP] = [self._after_step[0], self._after_step[1][:SITE_MAX]]
        if any(model.ranks and len(model.ranks) == 1 < self.probe.world for model in models):
            step.facts[ALONE] = self._calls
        self._tell_untouched(step, models)

    def _tell_untouched(self, step: Step, models: list[Model]) -> None:
        own = {id(parameter) for parameter in own_parameters(step.optimizer)}
        names = names_of(models)
        keys = [key for key in self._untouched.get(0, ()) if key in own and key in names]
        self._names.tell(step, UNTOUCHED, [names[key] for key in keys])

    # ---- sizes ---------------------------------------------------------------------------------------------

    def _least(self, optimizer: Optimizer | None = None) -> int:
        if optimizer is not None:
            own = [parameter for parameter in own_parameters(optimizer) if parameter.requires_grad]
            return max(ELEMENTS_MIN, int(SHARE * sum(parameter.numel() for parameter in own)))
        if self._size is None:
            every = {id(p): p.numel() for model in self.probe.models for _, p in model.parameters() if p.requires_grad}
            self._size = sum(every.values())
        return max(ELEMENTS_MIN, int(SHARE * self._size))

    def _close_parameters(self) -> None:
        """The steps are over for now, the next pass begins: was it parameters that were exchanged?"""
        if self._elements["parameters"] < self._least():
            return
        self._exchanges += 1
        if self._exchanges <= EXTRA_CLOSE or self._exchanges % 10 == 0:
            for index, optimizer in enumerate(self.probe.optimizers):
                if mode_of(models_of(optimizer, self.probe.models)) in ("plain", "local", "ddp"):
                    self.probe.extra.add((index, self.probe.number_of(index) + 1))

    def _is_close(self) -> bool:
        return (
            is_distributed()
            and self.probe.sampler.due(self.probe.step + 1)
            and any(model.wrapper is not None for model in self.probe.models)
        )

    def _snapshot(self) -> dict[int, tuple[int, int]]:
        """Parameters with a gradient: which tensor it is, and how often it was written to."""
        found = {}
        for model in self.probe.models:
            for _, parameter in model.parameters():
                if parameter.grad is not None:
                    found[id(parameter)] = id(parameter.grad), parameter.grad._version
        return found

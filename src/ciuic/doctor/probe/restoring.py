"""What was loaded before the first step, and what of it training began with."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ciuic.doctor.facts_data import LOADED, NOT_ACTIVE, NOT_RESTORED, SAVED_TO, UNTIED
from ciuic.doctor.probe.batches import sample
from ciuic.doctor.probe.checkpoint import File, look, path_of, settings_of, tensor_key
from ciuic.doctor.probe.loads import Load, changed, load_of
from ciuic.doctor.probe.named import own_parameters
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.probe.ties import Ties

FILES_MAX, LOADS_MAX, SAVES_MAX = 16, 32, 64
MOST = 0.9
APART = 1e-2
"""Relative distance of a copy to the weights it stands for: more than a type's rounding."""
STATE_STEPS = 2
"""Judged at the step of this number: schedulers and scalers are known then."""


class Restoring(Part):
    """Notices LOADED, NOT_RESTORED, NOT_ACTIVE, UNTIED and SAVED_TO."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._files: list[File] = []
        self._loads: list[Load] = []
        self._optimizers: dict[int, bool] = {}
        """By id: whether a state that was not empty was loaded into it."""
        self._schedulers: list[Any] = []
        self._loaded_schedulers = self._loaded_scalers = 0
        self._scaler: Any = None
        self._scale = 0.0
        self._empty: set[int] = set()
        """Optimizers whose state was empty before their first step."""
        self._looked: set[int] = set()
        self._ties = Ties()
        self._saves = 0
        self._copied: set[str] = set()

    # ---- files and loads ---------------------------------------------------------------------------------------------

    def read(self, where: Any, what: Any) -> None:
        """A file."""
        if self.probe.step == 0 and len(self._files) < FILES_MAX:
            self._files.append(look(where, what))

    def read_into(self, where: Any, state: Any) -> None:
        """A state that was filled from a checkpoint: what is in it was asked for."""
        if self.probe.step == 0 and len(self._files) < FILES_MAX:
            self._files.append(look(where, state))
            self._files[-1].is_asked = True

    def saved_to(self, what: Any, where: Any) -> None:
        """Who writes which file?"""
        path = path_of(where)
        if path and not path.startswith("/dev/") and self._saves < SAVES_MAX:
            self._saves += 1
            self.probe.note(SAVED_TO, path=path[-200:])

    def loading(self, target: Any, state: Any) -> None:
        """Ties before."""
        if isinstance(target, nn.Module) and self.probe.step == 0:
            self._ties.before_load(target)

    def loaded(self, target: Any, state: Any, result: Any) -> None:
        """Something took a state."""
        if self.probe.step:
            return
        if isinstance(target, nn.Module):
            self._ties.after_load(target)
            known = next((at for at, load in enumerate(self._loads) if load.module() is target), None)
            load = load_of(target, state, result)
            if known is not None:
                before = self._loads.pop(known)
                load = load if load.used >= before.used else before
            if len(self._loads) < LOADS_MAX:
                self._loads.append(load)
        elif isinstance(target, Optimizer):
            self._optimizers[id(target)] = bool(target.state) or self._optimizers.get(id(target), False)
        elif isinstance(target, LRScheduler):
            self._loaded_schedulers += 1
        elif isinstance(target, torch.amp.GradScaler):
            self._loaded_scalers += 1

    def scheduler_made(self, scheduler: Any) -> None:
        """They are few."""
        if len(self._schedulers) < FILES_MAX:
            self._schedulers.append(scheduler)

    def scaled(self, scaler: Any, loss: Any) -> None:
        """The first scale that is used."""
        if self._scaler is None:
            self._scaler = scaler
            self._scale = float(scaler.get_scale()) if any(file.scales for file in self._files) else 0.0

    # ---- what training begins with -----------------------------------------------------------------------------------

    def forward_begin(self, model: Model, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The first training forward pass of a model."""
        if self.probe.step or model.index in self._looked or not torch.is_grad_enabled() or not model.module.training:
            return
        self._looked.add(model.index)
        broken = self._ties.now(model.module)
        if broken is not None:
            self.probe.note(UNTIED, one=broken[0], other=broken[1], how=broken[2])
        own = {id(parameter): name for name, parameter in model.parameters()}
        for load in self._loads:
            names, total = changed(load, own)
            if total >= 2 and len(names) >= MOST * total:
                self.probe.note(NOT_ACTIVE, names=names[:8], count=len(names), total=total, how="overwritten")

    def before_step(self, step: Step) -> None:
        """Before the first, and when all is known."""
        if step.number == 1:
            if step.index == 0:
                self._tell_loads()
            if not step.optimizer.state:
                self._empty.add(step.index)
            if self._files:
                self._copies(step.optimizer)
        elif step.number == STATE_STEPS:
            self._optimizer(step)
            if step.index == 0:
                self._scheduler_and_scaler()

    def _tell_loads(self) -> None:
        trained = {id(module) for model in self.probe.models for module in model.module.modules()}
        for load in self._loads:
            module = load.module()
            if module is not None:
                is_trained = any(id(each) in trained for each in module.modules())
                self.probe.note(LOADED, trained=is_trained, **load.facts())

    # ---- optimizers, schedulers, scalers -----------------------------------------------------------------------------

    def _optimizer(self, step: Step) -> None:
        if step.index not in self._empty or not _has_moments(step.optimizer):
            return
        here = [settings_of(group) for group in step.optimizer.param_groups]
        goes_on = self._loaded_schedulers or self._loaded_scalers or any(self._optimizers.values())
        if any(known and key != id(step.optimizer) for key, known in self._optimizers.items()) and not any(
            other is not step.optimizer and self._optimizers.get(id(other)) for other in self.probe.optimizers
        ):
            self._tell("optimizer", self._name(), 0.85, "loaded into another optimizer than the one that steps")
            return
        for file in self._files:
            if not file.optimizers or not self._weights_came(file):
                continue
            full = [saved for saved in file.optimizers if saved.has_state]
            if full and len([1 for known in self._optimizers.values() if known]) < len(full):
                same = any(_alike(saved.groups, here) for saved in full)
                sure = 0.95 if goes_on else 0.85 if file.is_asked else 0.5 if same else 0.3
                self._tell("optimizer", file.name, sure, "in the file and not loaded")
                return
            steps = max([file.steps, *file.last_epochs])
            if not full and self._optimizers.get(id(step.optimizer)) is False and steps > 0:
                self._tell("optimizer", file.name, 0.9, "empty in the file", saved=steps)
                return

    def _scheduler_and_scaler(self) -> None:
        if not any(self._optimizers.values()) and not self._loaded_scalers and not self._loaded_schedulers:
            return
        for file in self._files:
            now = max((int(getattr(each, "last_epoch", 0)) for each in self._schedulers), default=-1)
            if file.last_epochs and not self._loaded_schedulers and 0 <= now < max(file.last_epochs) - 1:
                self._tell(
                    "scheduler", file.name, 0.95, "in the file and not loaded", saved=max(file.last_epochs), now=now
                )
            if file.scales and not self._loaded_scalers and self._scale and self._scale not in file.scales:
                self._tell(
                    "scaler", file.name, 0.95, "in the file and not loaded", saved=file.scales[0], now=self._scale
                )

    def _tell(self, what: str, file: str, sure: float, why: str, **numbers: float) -> None:
        self.probe.note(NOT_RESTORED, what=what, file=file, sure=sure, why=why, **numbers)

    def _name(self) -> str:
        return next((file.name for file in self._files if file.optimizers), "the checkpoint")

    def _weights_came(self, file: File) -> bool:
        """Whether a model that is trained took weights: they have moved since, so loads are what shows it."""
        trained = {id(module) for model in self.probe.models for module in model.module.modules()}
        for load in self._loads:
            module = load.module()
            if module is not None and load.used and any(id(each) in trained for each in module.modules()):
                return True
        return file.name in self._copied

    # ---- copies ------------------------------------------------------------------------------------------------------

    def _copies(self, optimizer: Optimizer) -> None:
        """An optimizer that has copies of the weights: are they the same?"""
        owned = {id(parameter) for model in self.probe.models for _, parameter in model.parameters()}
        self._copied = {
            file.name
            for file in self._files
            if any(tensor_key(p) in file.tensors for p in own_parameters(optimizer)[:8])
        }
        own = own_parameters(optimizer)
        if any(id(parameter) in owned for parameter in own):
            return
        for model in self.probe.models:
            pairs = [(name, p) for name, p in model.parameters() if p.requires_grad]
            if len(pairs) != len(own) or any(p.shape != copy.shape for (_, p), copy in zip(pairs, own, strict=True)):
                continue
            apart = [name for (name, p), copy in zip(pairs, own, strict=True) if _distance(p, copy) > APART]
            if len(apart) >= MOST * len(own):
                file = next(iter(self._copied), "")
                self.probe.note(NOT_ACTIVE, names=apart[:8], count=len(apart), total=len(own), how="copy", file=file)


def _alike(saved: list[tuple[int, tuple[Any, ...]]], here: list[tuple[int, tuple[Any, ...]]]) -> bool:
    return len(saved) == len(here) and all(one == other for one, other in zip(saved, here, strict=True))


def _has_moments(optimizer: Optimizer) -> bool:
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        return any(isinstance(value, Tensor) and value.numel() > 1 for value in values)
    return False


def _distance(one: Tensor, other: Tensor) -> float:
    if hasattr(one, "device_mesh") or hasattr(other, "device_mesh"):
        return 0.0
    a, b = sample(one, 256).double(), sample(other, 256).double()
    return float((a - b).norm() / (a.norm() + b.norm() + 1e-30))

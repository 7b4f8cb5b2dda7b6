"""Turns what a program does with torch into the probe's events. Results are never touched."""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ciuic.doctor.probe.discover import model_of
from ciuic.doctor.probe.loaded_later import WhenLoaded
from ciuic.doctor.probe.on_module import AroundHook, OnModule
from ciuic.doctor.probe.part import Model
from ciuic.doctor.probe.patches import Patches
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.stack import is_called_by

Original = Callable[..., Any]


def install(probe: Probe) -> Patches:
    """All hooks; `undo()` of what is returned removes them."""
    patches = Patches()
    _optimizers(probe, patches)
    _wrappers(probe, patches)
    _backward(probe, patches)
    _schedulers(probe, patches)
    _scalers(probe, patches)
    _clipping(probe, patches)
    _states(probe, patches)
    _files(probe, patches)
    _data(probe, patches)
    _saved_tensors(probe, patches)
    _joins(probe, patches)
    return patches


def hook_model(probe: Probe, model: Model, patches: Patches) -> None:
    """Forward passes of one model."""

    # where torch.compile traces a hook, it must find nothing: anything else would break the graph or compile anew

    def begin(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            model.forwards += 1
            model.passes[0] += 1
        probe.enter("forward")
        probe.emit("forward_begin", model, inputs, keywords)

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        probe.emit("forward_end", model, output)
        probe.enter("other")

    def through(module: nn.Module, inputs: Any) -> None:
        probe.emit("wrapper_begin", model)
        if torch.is_grad_enabled():
            synced = bool(getattr(module, "require_backward_grad_sync", True))
            model.wrapper_forwards += 1
            model.synced_forwards += synced
            model.passes[1:] = [model.passes[1] + 1, model.passes[2] + synced, int(synced)]

    def around(original: Original) -> Original:
        def call(*inputs: Any, **keywords: Any) -> Any:
            OnModule(begin)(model.module, inputs, keywords)
            output = original(*inputs, **keywords)
            OnModule(end)(model.module, inputs, output)
            return output

        return call

    if getattr(model.module, "_compiled_call_impl", None) is not None:  # module.compile(): it traces its own hooks
        patches.around(model.module, "_compiled_call_impl", around)
    else:
        patches.handle(model.module.register_forward_pre_hook(OnModule(begin), with_kwargs=True))
        patches.handle(model.module.register_forward_hook(OnModule(end)))
    if model.wrapper is not None:
        patches.handle(model.wrapper.register_forward_pre_hook(OnModule(through)))


def _optimizers(probe: Probe, patches: Patches) -> None:
    making_state: set[int] = set()
    """Optimizers whose step of nothing is under way: torch's checkpoints make one, to have moments to fill."""

    def before(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if not optimizer.state and is_called_by("torch.distributed.checkpoint.state_dict"):
            making_state.add(id(optimizer))
            return
        closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
        began_ns = time.thread_time_ns()
        step = probe.attempt(optimizer, closure=callable(closure))
        probe.account(began_ns)
        probe.enter("step")
        probe.emit("before_step", step)

    def after(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(optimizer) in making_state:
            making_state.discard(id(optimizer))
            return
        step = probe.current(optimizer) or probe.attempt(optimizer, closure=False)
        step.taken = True
        probe.finish(step)
        probe.enter("other")

    patches.handle(register_optimizer_step_pre_hook(before))
    patches.handle(register_optimizer_step_post_hook(after))

    def zero(original: Original) -> Original:
        def zero_grad(owner: Any, *arguments: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(owner, *arguments, **keywords)
            probe.emit("zero_grad", owner)
            return original(owner, *arguments, **keywords)

        return zero_grad

    patches.around(Optimizer, "zero_grad", zero)
    patches.around(nn.Module, "zero_grad", zero)


def _wrappers(probe: Probe, patches: Patches) -> None:
    def wrap(original: Original) -> Original:
        def init(wrapper: DistributedDataParallel, *arguments: Any, **keywords: Any) -> None:
            module = keywords.get("module", arguments[0] if arguments else None)
            if isinstance(module, nn.Module):
                probe.emit("wrapping", module, arguments, keywords)
            original(wrapper, *arguments, **keywords)
            probe.found(model_of(wrapper, len(probe.models)))

        return init

    def register(original: Original) -> Original:
        def register_comm_hook(wrapper: DistributedDataParallel, state: object, hook: Any) -> None:
            if not callable(hook) or not hasattr(hook, "__name__"):
                return original(wrapper, state, hook)

            return original(wrapper, state, AroundHook(hook, functools.partial(probe.emit, "bucket")))

        return register_comm_hook

    patches.around(DistributedDataParallel, "__init__", wrap)
    patches.around(DistributedDataParallel, "register_comm_hook", register)


def _backward(probe: Probe, patches: Patches) -> None:
    def make(original: Original) -> Original:
        def backward(tensors: Any, *arguments: Any, **keywords: Any) -> None:
            if torch.compiler.is_compiling():
                return original(tensors, *arguments, **keywords)
            if not isinstance(tensors, torch.Tensor | GradientEdge):
                tensors = tuple(tensors)  # an iterator can be asked once
            given = tensors if type(tensors) is tuple else (tensors,)
            roots = tuple(root for root in given if isinstance(root, torch.Tensor))
            before = probe.enter("backward")
            probe.emit("backward_begin", roots)
            original(tensors, *arguments, **keywords)
            probe.emit("backward_end", roots)
            probe.enter(before)

        return backward

    patches.around(torch.autograd, "backward", make)


def _schedulers(probe: Probe, patches: Patches) -> None:
    depth = [0]

    def make(original: Original) -> Original:
        def step(scheduler: Any, *arguments: Any, **keywords: Any) -> Any:
            depth[0] += 1
            try:
                result = original(scheduler, *arguments, **keywords)
            finally:
                depth[0] -= 1
            if not depth[0]:  # neither inside another one's step nor in a constructor
                probe.emit("scheduler_step", scheduler)
            return result

        return step

    def made(original: Original) -> Original:
        def init(scheduler: Any, *arguments: Any, **keywords: Any) -> None:
            depth[0] += 1
            try:
                original(scheduler, *arguments, **keywords)
            finally:
                depth[0] -= 1
            if not depth[0]:
                probe.emit("scheduler_made", scheduler)

        return init

    kinds = [LRScheduler, *_all_below(LRScheduler)]
    for kind in dict.fromkeys([*kinds, ReduceLROnPlateau]):
        patches.around(kind, "step", make)
        patches.around(kind, "__init__", made)


def _all_below(kind: type) -> list[type]:
    return [found for sub in kind.__subclasses__() for found in (sub, *_all_below(sub))]


def _scalers(probe: Probe, patches: Patches) -> None:
    kind = torch.amp.GradScaler

    def scale(original: Original) -> Original:
        def scale(scaler: Any, outputs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(scaler, outputs)
            result = original(scaler, outputs)
            if scaler.is_enabled():
                probe.emit("scaled", scaler, outputs)
            return result

        return scale

    def unscale(original: Original) -> Original:
        def unscale_(scaler: Any, optimizer: Optimizer) -> None:
            original(scaler, optimizer)
            if scaler.is_enabled():
                probe.emit("unscaled", scaler, optimizer)

        return unscale_

    def step(original: Original) -> Original:
        def step(scaler: Any, optimizer: Optimizer, *arguments: Any, **keywords: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *arguments, **keywords)
            inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
            attempt = probe.attempt(inner, closure=False, scaler=scaler)
            result = original(scaler, optimizer, *arguments, **keywords)
            probe.finish(attempt)  # no step was made: it was skipped
            return result

        return step

    def update(original: Original) -> Original:
        def update(scaler: Any, *arguments: Any, **keywords: Any) -> None:
            before = scaler.get_scale() if scaler.is_enabled() and probe.has("scale_updated") else 0.0
            original(scaler, *arguments, **keywords)
            if scaler.is_enabled():
                probe.emit("scale_updated", scaler, before)

        return update

    for name, make in (("scale", scale), ("unscale_", unscale), ("step", step), ("update", update)):
        patches.around(kind, name, make)


def _clipping(probe: Probe, patches: Patches) -> None:
    def make(original: Original) -> Original:
        def clip_grad_norm_(parameters: Any, max_norm: float, *arguments: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(parameters, max_norm, *arguments, **keywords)
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            norm = original(given, max_norm, *arguments, **keywords)
            probe.emit("clipped", given, float(max_norm), norm)
            return norm

        return clip_grad_norm_

    patches.around(nn.utils, "clip_grad_norm_", make)
    nn.utils.clip_grad.__dict__["clip_grad_norm_"]
    patches.around(nn.utils.clip_grad, "clip_grad_norm_", lambda original: nn.utils.clip_grad_norm_)


def _states(probe: Probe, patches: Patches) -> None:
    def load(original: Original) -> Original:
        def load_state_dict(target: Any, *arguments: Any, **keywords: Any) -> Any:
            state = _first(arguments, keywords, "state_dict")
            before = probe.enter("load")
            probe.emit("loading", target, state)
            result = original(target, *arguments, **keywords)
            probe.emit("loaded", target, state, result)
            probe.enter(before)
            return result

        return load_state_dict

    owners: list[type] = [nn.Module, Optimizer, LRScheduler, *_all_below(LRScheduler), torch.amp.GradScaler]
    for owner in dict.fromkeys(owners):
        patches.around(owner, "load_state_dict", load)


def _files(probe: Probe, patches: Patches) -> None:
    parts: list[bool] = []

    def save(original: Original) -> Original:
        def save(*arguments: Any, **keywords: Any) -> Any:
            what = _first(arguments, keywords, "obj")
            before, began_s = probe.enter("save"), time.perf_counter()
            result = original(*arguments, **keywords)
            probe.emit("saved", what, time.perf_counter() - began_s)
            probe.emit("saved_to", what, _first(arguments[1:], keywords, "f"))
            probe.enter(before)
            return result

        return save

    patches.around(torch, "save", save)

    def read(original: Original) -> Original:
        def load(*arguments: Any, **keywords: Any) -> Any:
            before = probe.enter("load")
            try:
                what = original(*arguments, **keywords)
                if not parts:  # else one of the many files of a checkpoint that is read as a whole
                    probe.emit("read", _first(arguments, keywords, "f"), what)
            finally:
                probe.enter(before)
            return what

        return load

    patches.around(torch, "load", read)

    def read_parts(original: Original) -> Original:
        def load(*arguments: Any, **keywords: Any) -> Any:
            state = _first(arguments, keywords, "state_dict")
            before = probe.enter("load")
            parts.append(True)
            try:
                result = original(*arguments, **keywords)
            finally:
                parts.pop()
                probe.enter(before)
            probe.emit("read_into", _first(arguments[1:], keywords, "checkpoint_id"), state)
            return result

        return load

    def checkpoints(package: Any) -> None:
        for module in (package, package.state_dict_loader):
            patches.around(module, "load", read_parts)

    patches.handle(WhenLoaded("torch.distributed.checkpoint", checkpoints))


def _data(probe: Probe, patches: Patches) -> None:
    def begin(original: Original) -> Original:
        def __iter__(loader: Any) -> Any:  # noqa: N807 - it stands for that method
            probe.emit("loader_begins", loader)
            found = original(loader)
            with contextlib.suppress(AttributeError):  # a generator of the program's own has no room
                found._ciuic_loader, found._ciuic_batches = weakref.ref(loader), 0
            return found

        return __iter__

    def following(original: Original) -> Original:
        def __next__(iterator: Any) -> Any:  # noqa: N807 - it stands for that method
            before, began_s = probe.enter("data"), time.perf_counter()
            loader = getattr(iterator, "_ciuic_loader", _nothing)()
            try:
                batch = original(iterator)
            except StopIteration:
                probe.emit("loader_ends", loader, getattr(iterator, "_ciuic_batches", 0))
                raise
            finally:
                probe.enter(before)
            iterator._ciuic_batches = getattr(iterator, "_ciuic_batches", 0) + 1
            probe.emit("batch", loader, batch, time.perf_counter() - began_s)
            return batch

        return __next__

    def epoch(original: Original) -> Original:
        def set_epoch(sampler: Any, *arguments: Any, **keywords: Any) -> None:
            original(sampler, *arguments, **keywords)
            probe.emit("epoch_set", sampler, _first(arguments, keywords, "epoch"))

        return set_epoch

    patches.around(DataLoader, "__iter__", begin)
    patches.around(_BaseDataLoaderIter, "__next__", following)
    patches.around(DistributedSampler, "set_epoch", epoch)


def _saved_tensors(probe: Probe, patches: Patches) -> None:
    kind = torch.autograd.graph.saved_tensors_hooks

    def enter(original: Original) -> Original:
        def __enter__(hooks: Any) -> None:  # noqa: N807 - it stands for that method
            original(hooks)
            if not torch.compiler.is_compiling():
                probe.packing += 1

        return __enter__

    def leave(original: Original) -> Original:
        def __exit__(hooks: Any, *arguments: object) -> None:  # noqa: N807 - it stands for that method
            original(hooks, *arguments)
            if torch.compiler.is_compiling():
                return
            probe.packing -= 1
            probe.packed_until = torch.autograd._get_sequence_nr()

        return __exit__

    patches.around(kind, "__enter__", enter)
    patches.around(kind, "__exit__", leave)


def _joins(probe: Probe, patches: Patches) -> None:
    def make(original: Original) -> Original:
        def _get_num_nonjoined_procs(join: Join) -> Any:
            others = original(join)
            probe.is_uneven = probe.is_uneven or bool(others)  # they go on without this rank's inputs
            return others

        return _get_num_nonjoined_procs

    patches.around(Join, "_get_num_nonjoined_procs", make)


def _nothing() -> None:
    """In the place of a reference."""


def _first(arguments: tuple[Any, ...], keywords: dict[str, Any], name: str) -> Any:
    """An argument that torch's callers may give by place or by the name that torch has for it."""
    return arguments[0] if arguments else keywords.get(name)


def initialised() -> bool:
    """Whether torch.distributed is in use."""
    return dist.is_available() and dist.is_initialized()

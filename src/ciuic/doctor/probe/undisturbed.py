"""A model runs and nothing changes: buffers, modes, attributes, random states, the probe's counters."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ciuic.doctor.probe.here import attached


@contextlib.contextmanager
def undisturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside, buffers are copies, and all random states begin at the seed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_probe_looks_away())
        stack.callback(_random_states_back())
        for module in model.modules():
            stack.callback(_restore, module, _kept(module))
        _use_copies(model)
        _seed(seed)
        yield


def random_states() -> list[bytes]:
    """Of Python, numpy, torch and each GPU."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch_states = [bytes(state.numpy().tobytes()) for state in (torch.get_rng_state(), *devices)]
    _, keys, *places = np.random.get_state(legacy=True)
    return [repr(random.getstate()).encode(), np.asarray(keys).tobytes() + repr(places).encode(), *torch_states]


@contextlib.contextmanager
def _probe_looks_away() -> Iterator[None]:
    at = attached()
    if at is None:
        yield
        return
    probe = at.probe
    was_mute, phase = probe.is_mute, probe.phase
    counts = [(model, model.forwards, list(model.passes)) for model in probe.models]
    probe.mute(True)
    try:
        yield
    finally:
        probe.mute(was_mute)
        probe.enter(phase)
        for model, forwards, passes in counts:
            model.forwards, model.passes = forwards, passes


def _random_states_back() -> Callable[[], None]:
    """What brings them back."""
    state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def give_back() -> None:
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return give_back


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _kept(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Public attributes (forward may count in them), and buffers."""
    return {name: value for name, value in vars(module).items() if _is_own(name)}, dict(module._buffers)


def _is_own(name: str) -> bool:
    return not name.startswith("_")


def _use_copies(model: nn.Module) -> None:
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        found = copies.get(id(tensor))
        if found is None:
            found = copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return found

    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copied(buffer)
        for name, value in list(vars(module).items()):
            if not _is_own(name):
                continue
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                vars(module)[name] = copied(value)
            elif type(value) in (list, dict, set):
                vars(module)[name] = copy.copy(value)


def _restore(module: nn.Module, kept: tuple[dict[str, Any], dict[str, Tensor | None]]) -> None:
    attributes, buffers = kept
    for name in [name for name in vars(module) if _is_own(name) and name not in attributes]:
        del vars(module)[name]
    vars(module).update(attributes)
    module._buffers.clear()
    module._buffers.update(buffers)

"""The probe's good manners: what a program does with its own objects works as it does without a doctor."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ciuic.doctor.probe.calls import Calls
from ciuic.doctor.probe.courier import Courier
from ciuic.doctor.probe.hooks import hook_model, install
from ciuic.doctor.probe.lossscale import PASSES_MAX, LossScale
from ciuic.doctor.probe.on_module import AroundHook
from ciuic.doctor.probe.part import Model, Part, Step
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.record import PROBE_FAILED, Notice


class Box:
    """Takes the place of the courier."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def failed(self) -> list[str]:
        return [m.facts["part"] for m in self.messages if isinstance(m, Notice) and m.kind == PROBE_FAILED]


class Passes(Part):
    """Counts forward passes."""

    seen = 0

    def forward_begin(self, model: Model, inputs: Any, keywords: Any) -> None:
        self.seen += 1


@pytest.fixture
def probe():
    """With hooks, and a part that listens to forward passes."""
    probe = Probe(Box(), rank=0, world=1)  # ty: ignore[invalid-argument-type]
    patches = install(probe)
    probe.patches = patches  # ty: ignore[unresolved-attribute]
    probe.add(Passes(probe))
    yield probe
    patches.undo()


def _hooked(probe: Probe) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    hook_model(probe, Model(index=0, module=model), probe.patches)  # ty: ignore[unresolved-attribute]
    return model


def test_a_whole_model_is_saved_and_read_where_no_ciuic_is(probe: Probe, tmp_path: Path):
    model = _hooked(probe)
    torch.save(model, tmp_path / "whole.pt")
    code = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False);"
        "print(tuple(model(torch.ones(1, 4)).shape), any(name.startswith('ciuic') for name in sys.modules))"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path / "whole.pt")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.strip() == "(1, 2) False", ended.stderr


def _through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))  # noqa: S301 - made here


@pytest.mark.parametrize("how", [copy.deepcopy, _through_pickle])
def test_passes_of_a_copy_are_not_the_models(probe: Probe, how: Any):
    model = _hooked(probe)
    how(model)(torch.ones(1, 4))
    assert probe.parts[0].seen == 0
    model(torch.ones(1, 4))
    assert probe.parts[0].seen == 1


def test_a_communication_hook_keeps_its_name_and_is_pickled_as_the_programs_own():
    told: list[Any] = []
    hook = AroundHook(_program_hook, told.append)
    assert hook("state", bucket="b") == ("state", "b")
    assert (hook.__name__, told) == ("_program_hook", ["b"])
    assert _through_pickle(hook)("state", "c") == ("state", "c")
    assert told == ["b"]


def _program_hook(state: Any, bucket: Any) -> Any:
    return state, bucket


def test_roots_of_a_backward_pass_may_be_an_iterator_or_edges(probe: Probe):
    weight = torch.ones(2, requires_grad=True)
    torch.autograd.backward(loss for loss in [weight.sum(), (2 * weight).sum()])
    assert weight.grad.tolist() == [3.0, 3.0]
    weight.grad = None
    edge = torch.autograd.graph.get_gradient_edge((5 * weight).sum())
    torch.autograd.backward(edge)
    assert weight.grad.tolist() == [5.0, 5.0]


class Odd(nn.Module):
    """Its parameters() wants to know of which kind."""

    def parameters(self, kind: str) -> Any:  # ty: ignore[invalid-method-override]
        raise NotImplementedError(kind)


def test_a_module_with_a_method_of_its_own_anywhere_in_the_process_ends_no_step(probe: Probe):
    odd = Odd()
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, 0.9])
    assert isinstance(odd, nn.Module)


def test_models_and_optimizers_that_a_program_makes_again_and_again_are_let_go(probe: Probe):
    made: list[Any] = []
    for _ in range(200):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters())
        made += [weakref.ref(model), weakref.ref(optimizer)]
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    gc.collect()
    assert sum(each() is not None for each in made) == 2
    assert len(probe.optimizers) <= 4
    assert len(probe.models) <= 1
    assert len(probe.patches._handles) < 1000  # ty: ignore[unresolved-attribute]


def test_a_group_that_torch_does_not_know_is_used_and_that_is_told_once(probe: Probe):
    Calls(probe, probe.patches)  # ty: ignore[unresolved-attribute]
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, 0, 1))
    tensor = torch.ones(2)
    for _ in range(2):
        group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]
    assert probe.courier.failed == ["Calls"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_function_that_clips_is_compiled_in_one_graph(probe: Probe):
    model = nn.Linear(4, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    torch._dynamo.reset()
    torch.compile(update, backend="eager", fullgraph=True)()
    norm = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).norm()
    assert float(norm) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_in_training_is_traced(probe: Probe):
    model = _hooked(probe)
    x = torch.ones(1, 4)
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


def test_workers_that_persist_end_with_their_loader(probe: Probe):
    loader = torch.utils.data.DataLoader(
        list(range(4)), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    assert len(list(loader)) == 4
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert gone() is None
    finally:
        gc.enable()


def test_passes_without_any_step_are_not_kept_for_ever(probe: Probe):
    part = LossScale(probe)
    probe.add(part)
    weight = torch.ones(2, requires_grad=True)
    for _ in range(PASSES_MAX + 200):
        weight.sum().backward()
    assert sum(map(len, part._forms.values())) == PASSES_MAX
    assert len(part._losses) == PASSES_MAX


class HandlerError(Exception):
    """What the program's handler raises."""


class Slow(Part):
    """A signal comes while it works."""

    def after_step(self, step: Step) -> None:
        signal.raise_signal(signal.SIGUSR1)


class Breaks(Part):
    """Fails, and takes its time to do so."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self.both = threading.Barrier(2)

    def zero_grad(self, owner: Any) -> None:
        self.both.wait(5)
        raise KeyError("x")


def test_a_part_that_fails_in_two_threads_at_once_fails_in_neither(probe: Probe):
    probe.add(Breaks(probe))
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(optimizer.zero_grad) for optimizer in optimizers]:
            ended.result(10)
    assert probe.courier.failed == ["Breaks", "Breaks"]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_raises_is_over(probe: Probe, scaled: bool):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=0.1) for weight in weights)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scaled)

    def closure() -> None:
        raise ZeroDivisionError

    weights[0].sum().backward()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            first.step(closure)
    scaler.scale(sum(weight.sum() for weight in weights)).backward()
    scaler.step(second)
    scaler.step(first)
    assert probe.tools == set()
    assert (probe.number_of(0), probe.number_of(1)) == (3, 1)


def test_a_forked_child_sends_nothing_even_when_the_lock_was_held():
    courier = Courier(("127.0.0.1", 9), "t", rank=0, world=1)
    with courier._queue.mutex:
        child = os.fork()
        if child == 0:
            courier.send(Notice(rank=0, step=0, kind="x", facts={}))
            courier.flush(5.0)
            courier.close()
            os._exit(7)
    until_s = time.monotonic() + 20
    ended, code = 0, 0
    while not ended and time.monotonic() < until_s:
        ended, code = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(code) == 7


def test_what_the_programs_signal_handler_raises_reaches_the_program(probe: Probe):
    def handler(number: int, frame: Any) -> None:
        raise HandlerError

    probe.add(Slow(probe))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        with pytest.raises(HandlerError):
            optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert probe.courier.failed == []

"""Hooks beside what else a program does with torch: compiled modules, several optimizers, optimizers in optimizers."""

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ciuic.doctor.facts_model import EXCHANGE, NAMES, SHARED
from ciuic.doctor.probe import flow as flows
from ciuic.doctor.probe.flow import Flow
from ciuic.doctor.probe.hooks import hook_model, install
from ciuic.doctor.probe.loaded_later import WhenLoaded
from ciuic.doctor.probe.named import named_parameters
from ciuic.doctor.probe.ownership import Ownership
from ciuic.doctor.probe.part import Call, Model, Part
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.record import PROBE_FAILED, Notice, Record


class Box:
    """Takes the place of the courier."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def facts(self, name: str, optimizer: int) -> list[Any]:
        records = [m for m in self.messages if isinstance(m, Record) and m.optimizer == optimizer]
        return [record.facts.get(name) for record in records]


class Net(nn.Module):
    """Dynamo leaves torch's own modules out when they are compiled alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


@pytest.fixture
def probe():
    """With hooks, without parts."""
    probe = Probe(Box(), rank=0, world=1)  # ty: ignore[invalid-argument-type]
    patches = install(probe)
    probe.patches = patches  # ty: ignore[unresolved-attribute]
    yield probe
    patches.undo()
    for part in probe.parts:
        part.ends()
    assert not [m for m in probe.courier.messages if isinstance(m, Notice) and m.kind == PROBE_FAILED]


def test_a_module_compiled_without_graph_breaks_runs_and_its_passes_are_counted(probe):
    module = Net()
    module.compile(backend="eager", fullgraph=True)
    model = Model(index=0, module=module)
    hook_model(probe, model, probe.patches)
    for _ in range(3):
        module(torch.ones(1, 4))
    assert model.passes[0] == 3


def test_hooks_of_a_module_that_is_compiled_later_are_not_traced(probe):
    inner = nn.Linear(4, 2)
    outer = nn.Sequential(inner)
    hook_model(probe, Model(index=0, module=inner), probe.patches)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(outer, backend="eager", fullgraph=True)
    for _ in range(4):
        compiled(torch.ones(1, 4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_step_of_an_optimizer_is_left_alone(probe):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    assert probe.step == 0


def test_two_optimizers_of_one_backward_pass_both_had_its_exchange(probe, monkeypatch):
    monkeypatch.setattr(flows, "is_distributed", lambda: False)
    part = Flow(probe)
    probe.add(part)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    both = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        gradients = tuple(p.grad for p in model.parameters())
        part.collective_begin(Call(name="all_reduce", number=1, ranks=(0, 1), site="", tensors=gradients))
        for optimizer in both:
            optimizer.step()
    for index in (0, 1):
        assert [exchange[0] for exchange in probe.courier.facts(EXCHANGE, index)] == [1, 1]


def test_what_only_another_optimizer_trains_is_not_this_ones():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[1].bias.requires_grad_(False)
    one, two = (torch.optim.SGD([layer.weight], lr=0.1) for layer in model)
    found = named_parameters(one, [Model(index=0, module=model)], [two])
    assert list(found) == ["0.weight", "0.bias", "1.bias"]


def test_arguments_that_torch_passes_by_name_get_through(probe, tmp_path):
    """torch.distributed.checkpoint calls load_state_dict(state_dict=...)."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = torch.utils.data.DistributedSampler(list(range(8)), num_replicas=2, rank=0)
    torch.save(obj=model.state_dict(), f=tmp_path / "model.pt")
    model.load_state_dict(state_dict=torch.load(f=tmp_path / "model.pt"))
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=2).load_state_dict(state_dict={"last_epoch": 3})
    torch.amp.GradScaler("cpu").load_state_dict(state_dict=torch.amp.GradScaler("cpu").state_dict())
    sampler.set_epoch(epoch=2)
    loss = model(input=torch.ones(1, 4)).sum()
    torch.Tensor.backward(self=loss, gradient=None)
    nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)
    optimizer.step(closure=None)
    optimizer.zero_grad(set_to_none=True)
    assert sampler.epoch == 2
    assert model.weight.grad is None


@pytest.mark.parametrize("kept", [False, True])
def test_an_optimizer_that_replaces_another_goes_on_under_its_number(probe, kept: bool):
    model = nn.Linear(4, 2)
    first = torch.optim.Adam(model.parameters(), lr=0.1)
    held, optimizer = [first] if kept else [], first
    gone = weakref.ref(first)
    del first
    for step in range(12):
        if step == 4:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert len(probe.optimizers) == 1
    assert (probe.number_of(0), probe.step) == (12, 12)
    gc.collect()
    assert (gone() is None) is not kept
    assert len(held) == kept


def test_optimizers_of_the_same_parameters_that_take_turns_stay_two(probe):
    model = nn.Linear(4, 2)
    inner, outer = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for step in range(24):
        model(torch.ones(1, 4)).sum().backward()
        (outer if step % 6 == 5 else inner).step()
    assert (probe.number_of(0), probe.number_of(1)) == (20, 4)


def test_optimizers_of_other_parameters_replace_nobody(probe):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    one, two = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    for step in range(10):
        model(torch.ones(1, 4)).sum().backward()
        (one if step < 2 else two).step()
    assert (probe.number_of(0), probe.number_of(1)) == (2, 8)


class _Reads(Part):
    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self.seen: list[tuple[str, Any]] = []

    def read(self, where: Any, what: Any) -> None:
        self.seen.append(("read", where))

    def read_into(self, where: Any, state: Any) -> None:
        self.seen.append(("read_into", sorted(state)))


def test_a_distributed_checkpoint_is_one_file_and_its_step_of_nothing_is_none(probe, tmp_path):
    """torch reads it as many files, and steps once with rate 0, so that there are moments to fill."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    part = _Reads(probe)
    probe.add(part)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    checkpoint.save(state, checkpoint_id=tmp_path)
    checkpoint.load(state, checkpoint_id=tmp_path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert part.seen == [("read_into", ["model", "optim"])]
    assert (probe.step, probe.optimizers) == (0, [])
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert probe.step == 1


def test_what_is_imported_later_is_told_once_and_not_after_the_end():
    told: list[str] = []
    sys.modules.pop("wave", None)
    WhenLoaded("wave", lambda module: told.append(module.__name__))
    import wave

    WhenLoaded("wave", lambda module: told.append("again"))
    gone = WhenLoaded("sndhdr_that_is_not", lambda module: told.append("never"))
    gone.remove()
    assert told == [wave.__name__, "again"]
    assert gone not in sys.meta_path


class _OwnLoader(torch.utils.data.DataLoader):
    def __iter__(self) -> Any:
        yield from range(3)


def test_a_loader_whose_iterator_is_a_generator_runs(probe):
    assert list(_OwnLoader([1, 2, 3])) == [0, 1, 2]


class _Around(torch.optim.SGD):
    """Steps by another optimizer that owns the same parameters, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_inside_an_optimizer_is_its_tool(probe):
    probe.add(Ownership(probe))
    model = nn.Linear(4, 2)
    optimizer = _Around(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert probe.tools == {1}
    notices = [m for m in probe.courier.messages if isinstance(m, Notice) and m.kind == NAMES]
    assert not [m for m in notices if m.facts["what"] == SHARED and m.facts["count"]]

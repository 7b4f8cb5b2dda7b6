"""What the probe sees of gradients, optimizers and parameters, in one process."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ciuic.doctor.facts import MOVEMENT
from ciuic.doctor.facts_model import NAMES, OWNED, STALE, STILL
from ciuic.doctor.probe.discover import find_models
from ciuic.doctor.probe.hooks import install
from ciuic.doctor.probe.movement import Movement
from ciuic.doctor.probe.named import has_memory, names_of
from ciuic.doctor.probe.ownership import Ownership
from ciuic.doctor.probe.part import Model
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.sketches import WIDTH, describe, fold
from ciuic.doctor.probe.stale import Stale
from ciuic.doctor.record import Notice, Record
from ciuic.doctor.rules.distance import distance


class Box:
    """Takes the place of the courier."""

    def __init__(self) -> None:
        self.messages: list = []

    def send(self, message) -> None:
        self.messages.append(message)

    def facts(self, name: str, optimizer: int = 0) -> list:
        records = [m for m in self.messages if isinstance(m, Record) and m.optimizer == optimizer]
        return [record.facts.get(name) for record in records]

    def names(self, what: str) -> list[str]:
        notices = [m.facts for m in self.messages if isinstance(m, Notice) and m.kind == NAMES]
        return [name for facts in notices if facts["what"] == what for name in facts["names"]]

    @property
    def failures(self) -> list:
        return [m for m in self.messages if isinstance(m, Notice) and m.kind == "probe_failed"]


@pytest.fixture
def box():
    """A probe with the parts that need no other rank."""
    box = Box()
    probe = Probe(box, rank=0, world=1)  # ty: ignore[invalid-argument-type]
    patches = install(probe)
    parts = [kind(probe) for kind in (Ownership, Stale, Movement)]
    for part in parts:
        probe.add(part)
    yield box
    patches.undo()
    for part in parts:
        part.ends()
    assert box.failures == []


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3, clear: bool = True) -> None:
    for _ in range(steps):
        if clear:
            optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@given(st.integers(1, 3 * WIDTH), st.integers(0, 5))
def test_sketches_are_linear(size, seed):
    random = torch.Generator().manual_seed(seed)
    a, b = torch.randn(size, generator=random), torch.randn(size, generator=random)
    torch.testing.assert_close(fold(a) - fold(b), fold(a - b), rtol=1e-4, atol=1e-4)


def test_a_sketch_tells_the_distance_of_large_tensors():
    a = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    b = a + 1e-3 * torch.randn(300_000, generator=torch.Generator().manual_seed(2))
    found = distance(describe(fold(a)), describe(fold(b)))
    assert found.relative == pytest.approx(1e-3, rel=0.5)
    assert distance(describe(fold(a)), describe(fold(a))).relative == 0.0
    scaled = distance(describe(fold(a)), describe(fold(a * 3)))
    assert scaled.ratio == pytest.approx(1 / 3, rel=1e-3)
    assert scaled.after_ratio < 1e-4


def test_a_sketch_shows_that_one_element_is_wrong():
    a = torch.randn(WIDTH)
    b = a.clone()
    b[7] += 1
    assert distance(describe(fold(a)), describe(fold(b))).blocks_share == 1 / 32


def test_sketches_draw_no_random_numbers():
    before = torch.get_rng_state()
    describe(fold(torch.ones(5 * WIDTH + 3)))
    assert torch.equal(before, torch.get_rng_state())


def test_names_of_two_models_do_not_hide_each_other():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    names = names_of([Model(index=0, module=one), Model(index=1, module=two)])
    assert sorted(names.values()) == ["Linear1.bias", "Linear1.weight", "bias", "weight"]


def test_freed_memory_is_not_read():
    tensor = torch.ones(8)
    assert has_memory(tensor)
    tensor.untyped_storage().resize_(0)
    assert not has_memory(tensor)


def test_a_healthy_loop_says_nothing(box):
    model = net()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert box.facts(OWNED) == [[4, 0, 0, 0, 0, 0]] * 3
    assert box.facts(STALE) == box.facts(STILL) == [None] * 3


def test_an_optimizer_of_a_copy_owns_strangers_and_the_model_is_found(box):
    model = net()
    owner = copy.deepcopy(model)
    train(model, torch.optim.AdamW(owner.parameters(), lr=1e-2))
    assert box.facts(OWNED)[-1][3:5] == [4, 4]
    assert "0.weight" in " ".join(box.names("strangers"))


def test_a_second_optimizer_that_has_not_stepped_yet_counts_as_owner(box):
    model = net()
    other = torch.optim.SGD(model[2].parameters(), lr=1e-2)
    train(model, torch.optim.AdamW(model[0].parameters(), lr=1e-2))
    assert box.facts(OWNED)[-1][3] == 0
    assert other.param_groups


def test_a_master_copy_that_is_written_back_is_no_orphan(box):
    model = net()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-2)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.clone()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    assert box.facts(OWNED)[-1][3] == 0


@pytest.mark.parametrize("to_none", [True, False])
def test_cleared_gradients_are_not_stale(box, to_none):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        for _ in range(2):  # micro-batches
            model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert box.facts(STALE) == [None] * 3


def test_gradients_that_nobody_clears_are_stale_from_the_second_step(box):
    model = net()
    train(model, torch.optim.SGD(model.parameters(), lr=1e-4), clear=False)
    assert [fact and fact[0] for fact in box.facts(STALE)] == [None, 1, 1]


def test_bfloat16_weights_that_cannot_move_are_named_as_rounding(box):
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
    assert box.facts(STILL)[-1][1] >= 2
    assert "0.weight" in box.names("still_rounding")


def test_a_bias_before_batchnorm_is_not_called_still(box):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().sum().backward()
        optimizer.step()
    assert box.facts(STILL) == [None] * 4


def test_a_warm_up_step_with_rate_zero_is_healthy(box):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer, steps=2)
    assert box.facts(STILL) == [None] * 2


def test_one_group_with_rate_zero_is_told(box):
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
    train(model, torch.optim.SGD(groups, lr=1e-3))
    assert box.facts(STILL)[-1] == [2, 0, 0]
    assert box.names("still_rate") == ["2.weight", "2.bias"]


def test_the_movement_notice_has_one_byte_for_each_module(box):
    model = net()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), steps=2)
    first, second = (m.facts for m in box.messages if isinstance(m, Notice) and m.kind == MOVEMENT)
    assert first["modules"] == ["0", "2"]
    assert "modules" not in second
    assert len(second["moved"]) == len(second["grads"]) == len(second["flags"]) == 2
    assert all(second["moved"])
    assert second["flags"] == b"\0\0"


def test_a_frozen_module_is_in_the_movement_notice_with_its_sign(box):
    model = net()
    model[0].requires_grad_(False)
    train(model, torch.optim.AdamW(model[2].parameters(), lr=1e-2), steps=1)
    facts = next(m.facts for m in box.messages if isinstance(m, Notice) and m.kind == MOVEMENT)
    assert facts["modules"] == ["0", "2"]
    assert facts["flags"] == b"\x10\0"
    assert facts["moved"][0] == 0


def test_the_step_of_a_closure_uses_the_gradients_it_made(box):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert box.facts(OWNED) == [[4, 0, 0, 0, 0, 0]] * 2
    assert box.facts(STALE) == [None] * 2


def test_a_model_that_was_trained_before_is_no_orphan(box):
    old = net()
    old(torch.ones(2, 4)).sum().backward()
    model = net()
    train(model, torch.optim.SGD(copy.deepcopy(model).parameters(), lr=1e-2))
    assert box.facts(OWNED)[-1][3] == 4  # not those of `old`, nor of other tests
    assert old[0].weight.grad is not None


def test_a_known_model_is_not_looked_for_again():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = find_models(optimizer, [], trained=False)
    assert [each.module for each in found] == [model]
    assert find_models(optimizer, found) == []

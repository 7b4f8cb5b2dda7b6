"""Backward passes for nothing, frozen parameters that move, models left in evaluation mode; in one process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ciuic.doctor.facts_model import FROZEN, LEFT_IN_EVALUATION, THROWN
from ciuic.doctor.probe.hooks import hook_model, install
from ciuic.doctor.probe.manner import Manner
from ciuic.doctor.probe.ownership import Ownership
from ciuic.doctor.probe.part import Model, Part
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.thrown import Thrown
from ciuic.doctor.record import PROBE_FAILED, Notice, Record


class Box:
    """Takes the place of the courier."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def facts(self, name: str) -> list[Any]:
        return [message.facts.get(name) for message in self.messages if isinstance(message, Record)]


class Hooked(Part):
    """Forward passes of the models that are found."""

    patches: Any

    def model_found(self, model: Model) -> None:
        hook_model(self.probe, model, self.patches)


@pytest.fixture
def box() -> Iterator[Box]:
    box = Box()
    probe = Probe(box, rank=0, world=1)  # ty: ignore[invalid-argument-type]
    patches = install(probe)
    for kind in (Hooked, Ownership, Thrown, Manner):
        part = kind(probe)
        part.patches = patches  # ty: ignore[invalid-attribute-access]
        probe.add(part)
    yield box
    patches.undo()
    for part in probe.parts:
        part.ends()
    assert not [m for m in box.messages if isinstance(m, Notice) and m.kind == PROBE_FAILED]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(3, 4)).square().mean()


def _clears_each_piece(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        (_loss(model) / 3).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def _accumulates(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    for _ in range(3):
        (_loss(model) / 3).backward()
    optimizer.step()


def _by_sample(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clips the gradient of each sample, then steps with their sum."""
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        _loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total += parameter.grad
    for total, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad.copy_(total)
    optimizer.step()


def _sharpness_aware(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Climbs first, by hand."""

    def backward() -> None:
        _loss(model).backward()

    backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=0.01)
    optimizer.zero_grad()
    backward()
    optimizer.step()
    optimizer.zero_grad()


def _two_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The gradient of the first is only looked at."""
    _loss(model).backward()
    optimizer.zero_grad()
    _loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_passes_that_zero_grad_takes_away_are_counted_with_the_place(box: Box):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        _clears_each_piece(model, optimizer)
    told = box.facts(THROWN)[1:]
    assert [each[0] for each in told] == [2, 2, 2]
    assert told[0][1].endswith("in _clears_each_piece")


@pytest.mark.parametrize("step", [_accumulates, _by_sample, _sharpness_aware, _two_losses])
def test_passes_that_are_used_or_are_for_something_else_are_not(box: Box, step: Callable[..., None]):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        step(model, optimizer)
    assert box.facts(THROWN) == [None] * 4


def test_optimizers_that_step_in_turn_throw_nothing_away(box: Box):
    model = _model()
    both = [torch.optim.SGD(model[at].parameters(), 0.1) for at in (0, 2)]
    for turn in range(8):
        for optimizer in both:
            optimizer.zero_grad()
        _loss(model).backward()
        both[turn % 2].step()
    assert set(box.facts(THROWN)) == {None}


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_before_the_step_are_told(box: Box, to_none: bool):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        _loss(model).backward()
        optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()
    assert [each and (each[0], each[2]) for each in box.facts(THROWN)] == [None, (1, 1), (1, 1), (1, 1)]


def _trains(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()


@pytest.mark.parametrize("parts", [nn.Dropout, lambda: nn.BatchNorm1d(8), nn.Tanh])
def test_a_model_that_goes_on_in_evaluation_mode_is_told_when_that_matters(box: Box, parts: Callable[[], nn.Module]):
    model = nn.Sequential(nn.Linear(4, 8), parts(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _trains(model, optimizer, steps=3)
    model.eval()
    _trains(model, optimizer)
    assert box.facts(LEFT_IN_EVALUATION) == [None, None, None, None if parts is nn.Tanh else 1]


def test_a_model_that_was_in_evaluation_mode_from_the_beginning_or_froze_a_part_is_not(box: Box):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _trains(model, optimizer)
    model.train()
    _trains(model, optimizer)
    model[1].eval()
    _trains(model, optimizer)
    assert box.facts(LEFT_IN_EVALUATION) == [None, None, None]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_frozen_parameter_that_weight_decay_moves_is_told(box: Box, to_none: bool):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1)
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(False)
        optimizer.zero_grad(set_to_none=to_none)
        _loss(model).backward()
        optimizer.step()
    assert box.facts(FROZEN) == ([None] * 4 if to_none else [None, None, 2, 2])

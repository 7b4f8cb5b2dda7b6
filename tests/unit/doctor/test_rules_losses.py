import random

import pytest
from doctor_rounds import Room
from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.facts_training import LOSS
from ciuic.doctor.finding import Severity
from ciuic.doctor.rules.losses import Losses


def _run(*rows: tuple[float, ...]) -> Room:
    room = Room(Losses(), world=len(rows[0]))
    for step, row in enumerate(rows, 1):
        room.step(step, {rank: {LOSS: loss} for rank, loss in enumerate(row)})
    return room


def test_a_rank_whose_loss_stays_high_is_named():
    room = _run(*[(2.0, 2.1)] * 3, *[(0.4, 2.2)] * 8)
    (found,) = room.found
    assert (found.code, found.ranks, found.severity) == ("CIUIC-E6", (1,), Severity.WARNING)
    assert "2.2 where they have 0.4" in found.cause


def test_a_loss_that_is_exactly_zero_on_one_rank_is_named():
    assert not _run(*[(1.5, 0.0)] * 3).found
    (found,) = _run(*[(1.5, 0.0)] * 9).found
    assert (found.code, found.ranks, found.severity) == ("CIUIC-E6", (1,), None)
    assert "exactly 0" in found.cause


@pytest.mark.parametrize("rows", [[(0.0, 0.0)] * 9, [(1.5, 0.0), (1.5, 0.2)] * 5])
def test_losses_that_are_zero_everywhere_or_now_and_then_are_no_finding(rows: list[tuple[float, ...]]):
    assert not _run(*rows).found


def test_of_three_ranks_also_one_that_is_too_low():
    (found,) = _run(*[(1.0, 0.2, 1.1)] * 8).found
    assert found.ranks == (1,)


def test_twice_as_high_is_a_note():
    (found,) = _run(*[(1.0, 2.0)] * 9).found
    assert found.severity is Severity.NOTE


@pytest.mark.parametrize("bad", [float("nan"), -1.0, 0.0, float("inf")])
def test_losses_that_are_not_positive_are_not_compared(bad: float):
    assert not _run(*[(1.0, 9.0)] * 4, (1.0, bad), *[(1.0, 9.0)] * 7).found


@given(seed=st.integers(0, 2**32), world=st.integers(2, 6), spread=st.floats(0.01, 0.8))
def test_losses_that_differ_by_chance_are_no_alarm(seed: int, world: int, spread: float):
    draw = random.Random(seed)
    rows = [tuple(draw.lognormvariate(0.0, spread) for _ in range(world)) for _ in range(20)]
    assert not [found for found in _run(*rows).found if found.severity is not Severity.NOTE]

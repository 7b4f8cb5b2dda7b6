import math
from typing import Any

import pytest
from doctor_rounds import Room

from ciuic.doctor.facts_model import EXCHANGE, MODE
from ciuic.doctor.facts_training import FORM, HYPER, LOW, RATES, SCHEDULE, STRAY
from ciuic.doctor.finding import Severity
from ciuic.doctor.rules.schedule import Schedule

STEPS = (1, 2, 3, 4, 10, 20)


def _schedule(
    steps: int,
    planned: int = 0,
    *,
    name: str = "LambdaLR",
    between: int = 0,
    in_a_row: int = 0,
    early: int = 0,
    prepared: int = 0,
) -> list[Any]:
    return [name, steps, steps, planned, between, in_a_row, early, prepared]


def _alarms(room: Room) -> set[str]:
    return {finding.code for finding in room.found if finding.severity is not Severity.NOTE}


def _cosine(steps: int, end: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * steps / end))


def _cosine_run(per_step: int, end: int, *, prepared: int = 0, steps: tuple[int, ...] = STEPS) -> Room:
    """Records of a cosine that steps so often at each optimizer step."""
    room = Room(Schedule())
    for step in steps:
        rates = [_cosine(per_step * done, end) for done in range(step)]
        lowest = min(range(step), key=lambda at: rates[at])
        facts: dict[str, Any] = {RATES: [rates[-1]]}
        if lowest:
            facts[LOW] = [rates[lowest], lowest + 1, max(rates[:lowest])]
        made = per_step * (step - 1)
        in_a_row = (per_step - 1) * (step - 1)
        facts[SCHEDULE] = _schedule(made, end, name="CosineAnnealingLR", in_a_row=in_a_row, prepared=prepared)
        room.step(step, facts)
    return room


def test_a_prepared_scheduler_that_ends_early_is_found():
    room = _cosine_run(2, 20, prepared=1)
    assert "CIUIC-G1" in _alarms(room)
    assert "2 times" in next(f.cause for f in room.found if f.code == "CIUIC-G1" and f.severity is None)


def test_a_prepared_scheduler_with_a_schedule_of_all_processes_steps_is_a_note():
    room = _cosine_run(2, 40, prepared=1)
    assert _alarms(room) == set()
    assert {finding.code for finding in room.found} == {"CIUIC-G1"}


def test_a_cosine_as_long_as_the_run_is_no_finding():
    assert not _cosine_run(1, 24).found


def test_a_cosine_that_is_too_short_comes_back():
    room = _cosine_run(1, 12)
    assert _alarms(room) == {"CIUIC-G6"}


def test_cycles_on_purpose_are_no_finding():
    room = Room(Schedule())
    for step in STEPS:
        facts = {RATES: [0.5 + 0.5 * (step % 2)], LOW: [0.1, 2, 1.0]}
        room.step(step, facts | {SCHEDULE: _schedule(step, 4, name="CosineAnnealingWarmRestarts")})
    assert not room.found


@pytest.mark.parametrize("made", ["between", "in_a_row"])
def test_a_step_at_every_micro_batch_is_found(made: str):
    room = Room(Schedule())
    for step in STEPS:
        counts = {made: 3 * (step - 1)}
        room.step(step, {FORM: [4, 0.25, "mean", 8, 1], SCHEDULE: _schedule(4 * (step - 1), **counts)})
    assert _alarms(room) == {"CIUIC-G2"}


def test_one_step_per_epoch_is_no_finding():
    room = Room(Schedule())
    for step in STEPS:
        room.step(step, {FORM: [4, 0.25, "mean", 8, 1], SCHEDULE: _schedule(step // 6, name="StepLR"), RATES: [0.1]})
    assert not room.found


@pytest.mark.parametrize(
    ("rates", "code"),
    [
        ((0.01, 0.001, 0.002, 0.003), "CIUIC-G3"),
        ((0.0, 0.001, 0.002, 0.003), None),
        ((0.01, 0.009, 0.008, 0.007), None),
        ((0.01, 0.01, 0.01, 0.01), None),
        ((0.01, 0.001, 0.001, 0.001), None),
    ],
)
def test_a_warm_up_that_begins_after_the_first_step_is_found(rates: tuple[float, ...], code: str | None):
    room = Room(Schedule())
    for step, rate in enumerate(rates, start=1):
        room.step(step, {RATES: [rate]})
    assert _alarms(room) == ({code} if code else set())


def test_a_rate_that_differs_names_the_rank():
    room = Room(Schedule(), world=3)
    found = room.step(1, {0: {RATES: [0.1]}, 1: {RATES: [0.1]}, 2: {RATES: [0.2]}})
    assert [(finding.code, finding.ranks) for finding in found] == [("CIUIC-G4", (2,))]


@pytest.mark.parametrize(("exchange", "found"), [(None, False), ([1, 0, 0, 0], True), ([0, 0, 1, 1], True)])
def test_rates_of_models_that_exchange_nothing_may_differ(exchange: list[int] | None, found: bool):
    room = Room(Schedule())
    facts = {MODE: "plain"} | ({EXCHANGE: exchange} if exchange else {})
    for step in (1, 2, 3):
        room.step(step, {0: {**facts, RATES: [0.1]}, 1: {**facts, RATES: [0.2]}})
    assert bool(room.found) is found


def test_another_setting_is_asked_for_once_and_named():
    room = Room(Schedule())
    for step in STEPS:
        room.step(step, {0: {HYPER: 1}, 1: {HYPER: 2}})
    assert len(room.asked) == 1
    found = room.answer({0: {"group 0 weight_decay": 0.1}, 1: {"group 0 weight_decay": 0.2}})
    assert [(finding.code, finding.ranks) for finding in found] == [("CIUIC-G4", (1,))]
    assert "weight_decay" in found[0].cause


def test_counters_that_differ_are_found_before_the_rates():
    room = Room(Schedule())
    found = room.step(3, {0: {SCHEDULE: _schedule(2), RATES: [0.1]}, 1: {SCHEDULE: _schedule(0), RATES: [0.2]}})
    assert [(finding.code, finding.ranks) for finding in found] == [("CIUIC-G8", (1,))]


@pytest.mark.parametrize("what", ["stranger", "idle", "twin", "left"])
def test_a_scheduler_that_turns_nothing_is_found(what: str):
    room = Room(Schedule())
    found = room.step(4, {STRAY: ["StepLR", 3, "AdamW", what]})
    assert [finding.code for finding in found] == ["CIUIC-G5"]


def test_a_step_before_the_optimizers_first_is_found_once():
    room = Room(Schedule())
    room.step(3, {SCHEDULE: _schedule(3, early=1)})
    assert _alarms(room) == {"CIUIC-G7"}

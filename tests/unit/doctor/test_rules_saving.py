"""Saves that stop the loop: from hand-made signs of life."""

import time
from typing import Any

import pytest

from ciuic.doctor.case import Case
from ciuic.doctor.facts_waiting import SAVES, STEP_USUAL, STILL, WAITS
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Beat
from ciuic.doctor.rules.saving import Saving

SAVE = {SAVES: True, STILL: ["saving.py:8 in save"], STEP_USUAL: 0.02}


def _see(rule: Saving, case: Case, rank: int, phase_s: float, step: int = 5, **facts: Any) -> list[Finding]:
    beat = Beat(rank=rank, step=step, time_s=0, phase="other", phase_s=phase_s, facts=facts)
    case.beats[rank] = beat
    case.heard_s[rank] = time.monotonic()
    return [item.finding for item in rule.beat(case, beat)]


def _case() -> Case:
    return Case(ask=lambda *_, **__: None, world=2)


def test_a_save_for_which_the_others_wait_is_found():
    rule, case = Saving(), _case()
    _see(rule, case, 1, 1.4, **{WAITS: True})
    (found,) = _see(rule, case, 0, 1.5, **SAVE)
    assert (found.code, found.ranks) == ("CIUIC-L4", (0,))
    assert "saving.py:8" in found.cause


@pytest.mark.parametrize("phase_s", [0.2, 0.9])
def test_a_short_save_is_nothing(phase_s: float):
    rule, case = Saving(), _case()
    _see(rule, case, 1, 1.4, **{WAITS: True})
    assert not _see(rule, case, 0, phase_s, **SAVE)


def test_a_save_of_a_few_slow_steps_is_nothing():
    rule, case = Saving(), _case()
    _see(rule, case, 1, 1.4, **{WAITS: True})
    assert not _see(rule, case, 0, 5.0, **{**SAVE, STEP_USUAL: 1.0})


def test_a_save_while_the_others_go_on_is_nothing():
    rule, case = Saving(), _case()
    _see(rule, case, 1, 0.1)
    assert not _see(rule, case, 0, 1.5, **SAVE)


def test_a_save_before_the_first_step_is_nothing():
    rule, case = Saving(), _case()
    _see(rule, case, 1, 1.4, step=0, **{WAITS: True})
    assert not _see(rule, case, 0, 1.5, step=0, **SAVE)


def test_a_rare_save_in_a_long_run_is_only_noted(monkeypatch: pytest.MonkeyPatch):
    rule, case = Saving(), _case()
    _see(rule, case, 1, 0.1)
    began_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began_s + 600.0)
    _see(rule, case, 1, 1.4, **{WAITS: True})
    (found,) = _see(rule, case, 0, 1.5, **SAVE)
    assert found.severity is Severity.NOTE

"""Who keeps the others waiting: from hand-made signs of life; the clock is the test's."""

from typing import Any

import pytest

from ciuic.doctor.case import Asked, Case
from ciuic.doctor.environment import HANG_S
from ciuic.doctor.facts import LEFT_IN
from ciuic.doctor.facts_waiting import CPU, HISTORY, OPEN, STEP_USUAL, STILL, WAITS
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Beat, Bye, Hello
from ciuic.doctor.rules.hang import Hang

LIMIT_S = 3.0
CALL = {"group": "0", "number": 12, "name": "all_reduce", "detail": "", "site": "train.py:9 in main", "ranks": []}


class World:
    """A case whose clock moves when the test says so."""

    def __init__(self, world: int = 2) -> None:
        self.asked: list[Any] = []
        self.case = Case(ask=lambda rule, kind, ranks, **more: self.asked.append((kind, tuple(ranks))), world=world)
        self.rule = Hang(LIMIT_S)
        self.now_s = 100.0
        for rank in range(world):
            self.case.hellos[rank] = Hello(token="", rank=rank, world=world, host="h", pid=rank)
        self.findings: dict[str, Finding] = {}

    def beat(self, rank: int, phase: str, phase_s: float, step: int = 8, **facts: Any) -> None:
        beat = Beat(rank=rank, step=step, time_s=0, phase=phase, phase_s=phase_s, facts={STEP_USUAL: 0.01, **facts})
        self.case.beats[rank] = beat
        self.case.heard_s[rank] = self.now_s
        list(self.rule.beat(self.case, beat))

    def waits(self, rank: int, phase_s: float, **facts: Any) -> None:
        self.beat(rank, "collective", phase_s, **{WAITS: True, STILL: ["train.py:9 in main"], OPEN: CALL, **facts})

    def tick(self, seconds: float = 0.2) -> Finding | None:
        self.now_s += seconds
        return self.take(self.rule.tick(self.case, self.now_s))

    def take(self, found: Any) -> Finding | None:
        last = None
        for item in found:
            last = getattr(item, "finding", item)
            self.findings[last.code] = last
            self.case.findings[last.key] = last
        return last


def test_a_rank_that_sleeps_elsewhere_is_named_with_its_line():
    world = World()
    world.waits(0, 3.1)
    world.beat(1, "other", 3.1, **{STILL: ["load.py:7 in read"], CPU: 0.0})
    found = world.tick()
    assert found is not None
    assert (found.code, found.ranks, found.severity) == ("CIUIC-J3", (1,), Severity.WARNING)
    assert "load.py:7" in found.cause
    assert "sleeps" in found.cause


def test_a_rank_that_computes_without_end_is_told_from_one_that_sleeps():
    world = World()
    world.waits(0, 3.1)
    world.beat(1, "other", 3.1, **{STILL: ["loop.py:7 in turn"], CPU: 0.9})
    found = world.tick()
    assert found is not None
    assert "computes" in found.cause


def test_nothing_is_said_before_the_expected_time():
    world = World()
    world.waits(0, 2.9)
    world.beat(1, "other", 2.9, **{STILL: ["load.py:7 in read"]})
    assert world.tick() is None


def test_slow_steps_make_the_expected_time_longer():
    world = World()
    world.waits(0, 8.0, **{STEP_USUAL: 1.0})
    world.beat(1, "other", 8.0, **{STILL: ["load.py:7 in read"], STEP_USUAL: 1.0})
    assert world.tick() is None


def test_a_rank_that_shows_new_lines_is_slow_and_only_noted():
    world = World()
    for second in range(1, 5):
        world.waits(0, float(second))
        world.beat(1, "other", float(second), **{STILL: [f"evaluate.py:{second} in score"]})
        world.tick()
    found = world.findings["CIUIC-J3"]
    assert found.severity is Severity.NOTE
    assert "slow" in found.cause


@pytest.mark.parametrize("phase", ["save", "load", "start"])
def test_long_saves_and_preparations_of_one_rank_are_only_noted(phase: str):
    world = World()
    world.waits(0, 4.0)
    world.beat(1, phase, 4.0, **{STILL: ["save.py:7 in write"]})
    found = world.tick()
    assert found is not None
    assert found.severity is Severity.NOTE


def test_a_wait_that_ends_becomes_a_note_that_says_slow_not_dead():
    world = World()
    world.waits(0, 3.1)
    world.beat(1, "other", 3.1, **{STILL: ["load.py:7 in read"]})
    world.tick()
    world.beat(0, "forward", 0.1)
    world.beat(1, "forward", 0.1)
    found = world.tick()
    assert found is not None
    assert (found.code, found.severity) == ("CIUIC-J3", Severity.NOTE)
    assert "slow, not dead" in found.cause


def test_a_wait_that_ends_with_an_error_was_a_hang():
    world = World()
    world.waits(0, 3.1)
    world.beat(1, "other", 3.1, **{STILL: ["load.py:7 in read"]})
    world.tick()
    world.case.byes[0] = Bye(rank=0, step=8, how="RuntimeError: timed out", facts={LEFT_IN: "collective"})
    world.case.gone[0] = "RuntimeError: timed out"
    found = world.take(world.rule.left(world.case, 0, "RuntimeError: timed out"))
    assert found is not None
    assert found.severity is Severity.CRITICAL


def test_a_silent_rank_with_an_open_connection_is_stopped():
    world = World()
    world.beat(1, "other", 0.1)
    world.now_s += 3.2
    world.rule.tick(world.case, world.now_s)
    world.waits(0, 3.1)
    found = world.tick()
    assert found is not None
    assert (found.code, found.ranks) == ("CIUIC-J6", (1,))


def test_nothing_is_judged_after_the_collector_itself_stood_still():
    world = World()
    world.beat(1, "other", 0.1)
    world.waits(0, 3.1)
    world.tick()
    world.now_s += 30
    world.waits(0, 3.2)
    assert world.tick() is None


def test_when_all_wait_they_are_asked_and_a_broken_link_is_the_answer():
    world = World()
    world.waits(0, 3.1)
    world.waits(1, 3.1)
    assert world.tick() is None
    assert world.asked == [(HISTORY, (0, 1))]
    rows = [[12, "all_reduce", "", "train.py:9 in main", 8]]
    done = Asked(
        number=1,
        kind=HISTORY,
        facts={},
        ranks=(0, 1),
        until_s=0,
        about=dict(world.case.beats),
        answers={0: {"calls": rows}, 1: {"calls": rows}},
    )
    found = world.take(world.rule.answered(world.case, done))
    assert found is not None
    assert found.code == "CIUIC-J7"


def test_two_receives_that_wait_for_each_other_are_an_order_of_calls():
    world = World()
    for rank in (0, 1):
        world.waits(rank, 3.1, **{OPEN: {**CALL, "name": "recv", "number": 0}})
    world.tick()
    done = Asked(number=1, kind=HISTORY, facts={}, ranks=(0, 1), until_s=0, about=dict(world.case.beats))
    found = world.take(world.rule.answered(world.case, done))
    assert found is not None
    assert found.code == "CIUIC-J2"


def test_a_rank_of_another_group_is_not_suspected():
    world = World(3)
    pair = {**CALL, "group": "1", "ranks": [0, 1]}
    world.waits(0, 3.1, **{OPEN: pair})
    world.beat(1, "other", 3.1, **{STILL: ["load.py:7 in read"]})
    world.beat(2, "other", 3.1, **{STILL: ["metrics.py:3 in write"]})
    found = world.tick()
    assert found is not None
    assert found.ranks == (1,)


def test_a_rank_that_is_not_watched_may_be_the_one_they_wait_for():
    world = World()
    del world.case.hellos[1]
    world.waits(0, 10.0)
    assert world.tick() is None
    assert not world.asked


@pytest.mark.parametrize(("text", "limit_s"), [("0.5", 0.5), ("", 3.0), ("much", 3.0), ("-1", 3.0), ("0", 3.0)])
def test_the_least_wait_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, limit_s: float):
    monkeypatch.setenv(HANG_S, text)
    world = World()
    world.beat(0, "other", 0.0)
    assert Hang().limit_s(world.case) == limit_s

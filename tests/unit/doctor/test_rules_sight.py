"""What could not be looked at is told, once."""

from typing import Any

from ciuic.doctor.case import ROUNDS_HELD, Case, Round
from ciuic.doctor.facts import UNEVEN
from ciuic.doctor.finding import Blind
from ciuic.doctor.record import DROPPED, PROBE_FAILED, Beat, Hello, Notice, Record
from ciuic.doctor.report.text import report_lines
from ciuic.doctor.rules.sight import Sight


def _case(world: int, heard: list[int]) -> Case:
    case = Case(ask=lambda *_, **__: None, world=world)
    for rank in heard:
        case.hellos[rank] = Hello(token="", rank=rank, world=world, host="h", pid=1)
    return case


def _round(step: int, **facts: Any) -> Round:
    found = Round(optimizer=0, step=step, began_s=0.0)
    for rank in (0, 1):
        own = facts if rank == 0 else {}
        found.records[rank] = Record(rank=rank, optimizer=0, step=step, time_s=0.0, facts=own)
    return found


def test_a_run_that_was_seen_whole_has_nothing_to_tell():
    rule, case = Sight(), _case(2, [0, 1])
    assert list(rule.round(case, _round(1))) == []
    assert list(rule.end(case)) == []


def test_a_part_that_failed_on_several_ranks_is_one_line():
    rule, case = Sight(), _case(2, [0, 1])
    for rank in (1, 0):
        facts = {"part": "Loads", "event": "batch", "error": "KeyError: 3"}
        list(rule.notice(case, Notice(rank=rank, step=4, kind=PROBE_FAILED, facts=facts)))
    (blind,) = rule.end(case)
    assert (blind.what, blind.why, blind.ranks) == ("Loads (batch)", "KeyError: 3", (0, 1))


def test_ranks_that_never_reported_are_named():
    (blind,) = Sight().end(_case(4, [0, 2]))
    assert blind.what == "ranks 1, 3"
    assert [each.what for each in Sight().end(_case(0, []))] == ["the program"]


def test_messages_that_a_rank_could_not_send_are_counted():
    rule, case = Sight(), _case(2, [0, 1])
    for dropped in (0, 3, 7):
        facts = {DROPPED: dropped} if dropped else {}
        list(rule.beat(case, Beat(rank=1, step=4, time_s=0.0, phase="", phase_s=0.0, facts=facts)))
    (blind,) = rule.end(case)
    assert (blind.what, blind.ranks) == ("7 messages at most", (1,))


def test_steps_that_gave_way_before_all_ranks_had_told_are_counted():
    case = _case(2, [0, 1])
    for step in range(1, ROUNDS_HELD + 4):
        case.round_of(Record(rank=0, optimizer=0, step=step, time_s=0.0, facts={}), 0.0).judged = step == 2
    (blind,) = Sight().end(case)
    assert blind.what == "2 steps that were looked at, the first 1"


def test_steps_after_an_early_join_are_not_compared_and_that_is_told_once():
    rule, case = Sight(), _case(2, [0, 1])
    uneven = _round(5, **{UNEVEN: True})
    assert uneven.groups() == []
    assert _round(5).groups() == [(0, 1)]
    assert len(list(rule.round(case, uneven))) == 1
    assert list(rule.round(case, _round(6, **{UNEVEN: True}))) == []


def test_nothing_found_is_not_said_of_what_nobody_looked_at():
    assert list(report_lines([], [])) == ["nothing found"]
    assert next(iter(report_lines([], [Blind(what="rank 1", why="gone")]))) != "nothing found"

"""Who is slow: from hand-made windows of times."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.case import Case, Round
from ciuic.doctor.facts_waiting import QUEUED, TIMES, WINDOW
from ciuic.doctor.finding import Finding
from ciuic.doctor.record import Record
from ciuic.doctor.rules.stragglers import Stragglers

CASE = Case(ask=lambda *_, **__: None, world=2)
WORK = ("data", "forward", "backward", "update", "other")
QUICK = {"data": 0.2, "forward": 1.0, "backward": 2.0, "update": 0.5, "other": 0.5, "waits": 2.0}


def _row(usual_ms: dict[str, float], least_ms: dict[str, float] | None = None, steps: int = 10) -> list[int]:
    row = [steps]
    for given_ms in (usual_ms, least_ms or usual_ms):
        times = {name: given_ms.get(name, 0.0) for name in TIMES}
        times["work"] = sum(times[name] for name in WORK)
        times["step"] = times["work"] + times["waits"] + times["save"]
        row += [round(1000 * times[name]) for name in TIMES]
    return row


def _see(rule: Stragglers, step: int, rows: dict[int, list[int]], queued_us: int | None = None) -> list[Finding]:
    round_ = Round(optimizer=0, step=step, began_s=0.0)
    for rank, row in rows.items():
        facts: dict[str, Any] = {WINDOW: row} | ({QUEUED: queued_us} if queued_us is not None else {})
        round_.records[rank] = Record(rank=rank, optimizer=0, step=step, time_s=0.0, facts=facts)
    return list(rule.round(CASE, round_))


def _twice(rows: dict[int, list[int]], queued_us: int | None = None) -> list[Finding]:
    rule = Stragglers()
    return [found for step in (10, 20) for found in _see(rule, step, rows, queued_us)]


def test_the_slow_backward_pass_of_one_rank_is_found_though_all_steps_take_the_same_time():
    slow, waiting = _row({**QUICK, "backward": 32.0}), _row({**QUICK, "waits": 32.0})
    (found,) = _twice({0: waiting, 1: slow})
    assert (found.code, found.ranks, found.evidence["phase"]) == ("CIUIC-L1", (1,), "backward")


def test_slow_data_have_a_code_of_their_own():
    (found,) = _twice({0: _row({**QUICK, "waits": 32.0}), 1: _row({**QUICK, "data": 30.0})})
    assert (found.code, found.ranks) == ("CIUIC-L2", (1,))


def test_a_loader_that_fetches_ahead_has_steps_without_a_fetch():
    slow = _row({**QUICK, "data": 33.0}, {**QUICK, "data": 0.1})
    assert [found.code for found in _twice({0: _row({**QUICK, "waits": 32.0}), 1: slow})] == ["CIUIC-L2"]


def test_one_slow_window_is_not_enough():
    rule = Stragglers()
    rows = {0: _row(QUICK), 1: _row({**QUICK, "backward": 32.0})}
    assert not _see(rule, 10, rows)
    assert not _see(rule, 20, {0: _row(QUICK), 1: _row(QUICK)})
    assert not _see(rule, 30, rows)


def test_a_rank_with_quick_steps_among_slow_ones_was_only_disturbed():
    assert not _twice({0: _row(QUICK), 1: _row({**QUICK, "backward": 32.0}, QUICK)})


def test_a_rank_that_waits_unseen_in_its_backward_pass_is_not_accused():
    unseen = {**QUICK, "backward": 32.0, "waits": 0.0}
    late = {**QUICK, "other": 31.0, "waits": 0.0}
    assert {found.ranks for found in _twice({0: _row(unseen), 1: _row(late)})} <= {(1,)}


def test_the_minority_of_four_is_named():
    rows = {rank: _row({**QUICK, "waits": 30.0}) for rank in range(4)} | {2: _row({**QUICK, "forward": 30.0})}
    assert [found.ranks for found in _twice(rows)] == [(2,)]


def test_input_bound_ranks_are_found_in_the_third_window():
    rule = Stragglers()
    rows = {rank: _row({**QUICK, "data": 90.0}) for rank in (0, 1)}
    assert [[found.code for found in _see(rule, step, rows)] for step in (10, 20, 30, 40)] == [[], [], ["CIUIC-L2"], []]


def test_long_waits_of_all_ranks_are_the_links():
    rows = {rank: _row({**QUICK, "waits": 40.0}) for rank in (0, 1)}
    assert [found.code for found in _twice(rows, queued_us=500)] == ["CIUIC-L3"]


def test_waits_on_a_machine_that_is_too_busy_are_not_the_links():
    rows = {rank: _row({**QUICK, "waits": 40.0}) for rank in (0, 1)}
    assert not _twice(rows, queued_us=60_000)


def test_waits_for_a_late_rank_are_not_the_links():
    rows = {0: _row({**QUICK, "waits": 40.0}), 1: _row({**QUICK, "other": 40.0})}
    assert "CIUIC-L3" not in {found.code for found in _twice(rows, queued_us=0)}


@given(
    st.lists(st.floats(0.1, 40.0), min_size=6, max_size=6),
    st.lists(st.floats(1.0, 1.4), min_size=4, max_size=4),
)
def test_ranks_within_the_margin_are_never_accused(times_ms: list[float], factors: list[float]):
    usual = dict(zip(("data", "forward", "backward", "update", "other", "waits"), times_ms, strict=True))
    rows = {rank: _row({name: ms * factor for name, ms in usual.items()}) for rank, factor in enumerate(factors)}
    assert not [found for found in _twice(rows) if found.ranks]


def test_rows_of_another_version_are_left_out():
    assert not _twice({0: [1, 2, 3], 1: _row(QUICK)})

"""From the lines of sites to stalls."""

import json
from pathlib import Path

import pytest

from ciuic.bench.resilience_lines import SiteLog, Window, read_site, stall_s, usual_step_s
from ciuic.errors import RunFailedError


def site(*ends: float, pid: int = 1) -> SiteLog:
    first, *rest = ends
    lines = [{"pid": pid, "event": "begin", "at_s": first}]
    return SiteLog(lines=(*lines, *({"pid": pid, "event": "step", "at_s": at} for at in rest)))


EVERYTHING = Window(start_s=0.0, stop_s=6.0)


def test_a_stall_is_what_the_longest_step_takes_beyond_the_usual_one() -> None:
    steady, stalled = site(0, 1, 2, 3, 4, 5, 6), site(0, 1, 2, 4.5, 5.25, 6)
    assert usual_step_s([steady], EVERYTHING) == 1.0
    assert stall_s([steady], EVERYTHING, 1.0) == 0.0
    assert stall_s([steady, stalled], EVERYTHING, 1.0) == 1.5


def test_a_step_that_never_ends_stalls_to_the_end_of_the_window() -> None:
    assert stall_s([site(0, 1, 2)], Window(start_s=2.0, stop_s=9.0), 1.0) == 6.0


def test_only_steps_that_touch_the_window_count() -> None:
    slow_start = site(0, 5, 6, 7, 8)
    assert stall_s([slow_start], Window(start_s=6.5, stop_s=8.0), 1.0) == 0.0
    assert stall_s([slow_start], Window(start_s=4.5, stop_s=8.0), 1.0) == 4.0


def test_the_time_between_two_processes_of_a_site_is_no_step() -> None:
    both = SiteLog(lines=site(0, 1, 2).lines + site(50, 51, 52, pid=2).lines)
    assert both.pids == [1, 2]
    assert both.steps(Window(start_s=0.0, stop_s=52.0)) == [1, 1, 1, 1]


def test_without_a_step_nothing_is_usual() -> None:
    with pytest.raises(RunFailedError, match="made no step"):
        usual_step_s([SiteLog(lines=())], EVERYTHING)


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps({"pid": 1, "event": "begin", "at_s": 1.0})
    (tmp_path / "us.jsonl").write_text(f'{whole}\n{{"pid": 1, "ev')
    assert len(read_site(tmp_path / "us.jsonl").lines) == 1
    assert read_site(tmp_path / "eu.jsonl").lines == ()


def test_a_timeline_is_what_was_logged_between_two_times_as_seconds_since_the_first() -> None:
    lines = (
        {"event": "imported", "at_s": 5.0},
        {"event": "log", "text": "a", "at_s": 5.5},
        {"event": "step", "at_s": 9},
    )
    assert SiteLog(lines=lines).timeline(5.0, 8.0) == [(0.0, "imported"), (0.5, "a")]

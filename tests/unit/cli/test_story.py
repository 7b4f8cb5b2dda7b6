"""The story of a run: in order, one sentence each, what repeats folded, nothing that matters hidden."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ciuic.cli.story import NOISE, story_lines
from ciuic.net.messages import Event


def event(number: int, kind: str, text: str = "", **data: Any) -> Event:
    return Event(
        id=number, time=1_700_000_000.0 + number, kind=kind, run_id="r", text=text or f"{kind} {number}", data=data
    )


def a_round(number: int, why: str = "complete", without: str = "") -> Event:
    data = {"version": number, "fragment": 0, "nodes": ["a"], "why": why, "without": without}
    return event(number, "round.closed", f"round {number} closed", **data)


def test_rows_of_rounds_become_one_line_that_says_who_was_missing() -> None:
    events = [event(0, "run.submitted")]
    events += [a_round(n, "deadline", "c") if n % 20 == 0 else a_round(n) for n in range(12, 58)]
    events += [
        event(60, "run.evaluated", loss=3.0),
        event(61, "snapshot.written"),
        event(62, "run.evaluated", loss=2.5),
    ]
    events += [event(75, "node.dead", "c is dead"), a_round(76)]
    lines = list(story_lines(events))
    assert lines[1] == " +0:00:00  run.submitted     run.submitted 0"
    assert lines[2].split() == [
        "+0:00:12",
        *["rounds", "12-57", "closed", "in", "45.0", "s,", "2", "by", "deadline", "(without", "c", "2", "times);"],
        *["held-out", "loss", "3.0000", "->", "2.5000;", "1", "snapshot", "written"],
    ]
    assert lines[3] == " +0:01:15  node.dead         c is dead"
    assert lines[4].endswith("round 76 closed"), "a single one is told as it is"


@given(st.lists(st.sampled_from([*NOISE, "node.dead", "push.rejected", "hub.started"]), max_size=40))
def test_everything_that_is_not_noise_has_its_line_in_order(kinds: list[str]) -> None:
    events = [event(n, kind, version=n, loss=1.0) for n, kind in enumerate(kinds)]
    told = [line.split("  ")[-1].strip() for line in story_lines(events)][1:]
    wanted = [e.text for e in events if e.kind not in NOISE]
    assert [text for text in told if text in wanted] == wanted
    assert len(list(story_lines(events, folds=False))) == (1 + len(events) if events else 0)


def test_control_characters_of_another_machine_do_not_reach_the_terminal() -> None:
    (_, line) = story_lines([event(0, "worker.failed", "boom \x1b[31m")])
    assert "\x1b" not in line

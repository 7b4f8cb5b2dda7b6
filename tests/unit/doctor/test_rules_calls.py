"""Order of calls: from hand-made signs of life and answers."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.case import Asked, Case
from ciuic.doctor.facts_waiting import CALLS, DDP_BUFFERS, DDP_GRADIENTS, HISTORY, LATE, NEW_CALL, UNEVEN
from ciuic.doctor.record import Beat, Bye, Hello, Notice
from ciuic.doctor.rules.calls import CallOrder, judge
from ciuic.doctor.rules.sequences import first_difference, steps_differ

Row = list[Any]


def _rows(*names: str, start: int = 1, steps: list[int] | None = None) -> list[Row]:
    """`all_reduce@a`: name and call site."""
    split = [name.partition("@") for name in names]
    numbered = enumerate(zip(split, steps or [0] * len(names), strict=True), start)
    return [[number, name, "", site or name, step] for number, ((name, _, site), step) in numbered]


def _case(world: int = 2) -> tuple[Case, list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    def ask(rule: Any, kind: str, ranks: Any, *, facts: Any, about: Any = None) -> None:
        asked.append({"kind": kind, "ranks": tuple(ranks), "facts": facts, "about": about})

    case = Case(ask=ask, world=world)
    for rank in range(world):
        case.hellos[rank] = Hello(token="", rank=rank, world=world, host="elsewhere", pid=1)
    return case, asked


def _beat(rank: int, marks: list[list[Any]], **facts: Any) -> Beat:
    return Beat(rank=rank, step=3, time_s=0, phase="other", phase_s=0, facts={CALLS: {"0": marks}, **facts})


def _answers(**by_rank: list[Row]) -> dict[int, dict[str, Any]]:
    return {int(name[1:]): {"calls": rows, "recorder": []} for name, rows in by_rank.items()}


def test_the_rank_with_one_call_more_is_named_and_its_call_site():
    usual = ["ddp@train", "ddp@train", "ddp@train", "ddp@train"]
    found = judge(_answers(r0=_rows(*usual, "barrier@save", "ddp@train"), r1=_rows(*usual, "ddp@train", "ddp@train")))
    assert found is not None
    assert (found.code, found.ranks) == ("CIUIC-J2", (0,))
    assert "call 5" in found.cause
    assert "barrier at save" in found.cause


def test_the_rank_that_skips_a_call_is_named():
    rounds = ["forward@f", "backward@b"] * 4
    found = judge(_answers(r0=_rows(*rounds), r1=_rows(*rounds[:7], "forward@f")))
    assert found is not None
    assert found.ranks == (1,)


def test_a_third_metric_is_seen_as_unusual_only_after_two_calls_before_it():
    loop = ["ddp@train", "metric@log", "metric@log"]
    found = judge(_answers(r0=_rows(*loop * 3, "ddp@train"), r1=_rows(*loop * 3, "metric@log")))
    assert found is not None
    assert found.ranks == (1,)


def test_two_equal_barriers_from_different_places_are_the_first_difference():
    head = ["ddp@train"] * 4
    difference = first_difference(
        {0: _rows(*head, "barrier@save", "ddp@train"), 1: _rows(*head, "barrier@epoch", "barrier@save")}
    )
    assert difference is not None
    assert difference.number == 5
    assert not difference.same_call


def test_the_minority_of_three_is_odd_when_nobody_has_a_habit():
    found = judge(_answers(r0=_rows("a"), r1=_rows("b"), r2=_rows("a")))
    assert found is not None
    assert found.ranks == (1,)


def test_other_shapes_of_one_call_are_another_code():
    rows = {rank: [[1, "all_reduce", f"float32[{4 + rank}] SUM", "x", 0]] for rank in (0, 1)}
    found = judge({rank: {"calls": each} for rank, each in rows.items()})
    assert found is not None
    assert found.code == "CIUIC-J4"
    assert "float32[5]" in found.cause


def test_calls_that_are_guessed_from_ddp_need_the_flight_recorder_to_agree():
    differing = _answers(r0=_rows(DDP_BUFFERS, DDP_GRADIENTS), r1=_rows(DDP_BUFFERS, DDP_BUFFERS))
    for facts in differing.values():
        facts["recorder"] = [[1, "broadcast", "[[4]]"], [2, "all_reduce", "[[8]]"]]
    assert judge(differing) is None
    differing[1]["recorder"][1] = [2, "broadcast", "[[4]]"]
    found = judge(differing)
    assert found is not None
    assert found.code == "CIUIC-J2"


def test_a_training_pass_that_meets_an_evaluation_pass_is_found_though_torch_sees_equal_calls():
    answers = _answers(r0=_rows(DDP_BUFFERS), r1=_rows(DDP_BUFFERS))
    answers[0]["calls"][0][2] = "without gradients"
    for facts in answers.values():
        facts["recorder"] = [[1, "broadcast", "[[4]]"]]
    found = judge(answers)
    assert found is not None
    assert found.code == "CIUIC-J2"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.integers(0, 29), st.integers(0, 29))
def test_equal_sequences_never_differ_wherever_their_windows_begin(names: list[str], cut: int, other_cut: int):
    rows = _rows(*names)
    assert first_difference({0: rows[cut:], 1: rows[other_cut:], 2: rows}) is None


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.data())
def test_one_changed_call_is_found_at_its_number(names: list[str], data: st.DataObject):
    at = data.draw(st.integers(0, len(names) - 1))
    changed = [*names[:at], "other", *names[at + 1 :]]
    same_site = {rank: [[*row[:3], "x", 0] for row in _rows(*each)] for rank, each in enumerate((names, changed))}
    difference = first_difference(same_site)
    assert difference is not None
    assert difference.number == at + 1


def test_digests_that_differ_lead_to_a_question_and_the_answer_to_a_finding():
    case, asked = _case()
    rule = CallOrder()
    assert not list(rule.beat(case, _beat(0, [[4, b"x"], [5, b"y"]])))
    assert not list(rule.beat(case, _beat(1, [[4, b"x"], [6, b"z"]])))
    assert not asked
    assert not list(rule.beat(case, _beat(1, [[5, b"not y"]])))
    assert [(each["kind"], each["ranks"]) for each in asked] == [(HISTORY, (0, 1))]
    answers = _answers(r0=_rows("a", "b"), r1=_rows("a", "c"))
    done = Asked(number=1, kind=HISTORY, facts={}, ranks=(0, 1), until_s=0, about="0", answers=answers)
    assert [found.code for found in rule.answered(case, done)] == ["CIUIC-J2"]


def test_ranks_under_join_or_watched_too_late_are_not_compared():
    for doubt in (UNEVEN, LATE):
        case, asked = _case()
        rule = CallOrder()
        list(rule.beat(case, _beat(0, [[4, b"x"]])))
        list(rule.beat(case, _beat(1, [[4, b"y"]], **{doubt: True})))
        assert not asked


def test_a_rank_that_comes_back_begins_anew():
    case, asked = _case()
    rule = CallOrder()
    list(rule.beat(case, _beat(0, [[4, b"x"]])))
    list(rule.hello(case, case.hellos[0]))
    list(rule.beat(case, _beat(1, [[4, b"y"]])))
    assert not asked


def test_announced_calls_that_do_not_fit_are_found_before_they_end_the_processes():
    case, _ = _case()
    rule = CallOrder()
    facts = {"group": "0", "number": 7, "name": "all_reduce", "site": "x", "step": 2, "ranks": []}
    first = Notice(rank=0, step=2, kind=NEW_CALL, facts={**facts, "detail": "float32[4]"})
    second = Notice(rank=1, step=2, kind=NEW_CALL, facts={**facts, "detail": "float32[5]"})
    assert not list(rule.notice(case, first))
    assert [found.code for found in rule.notice(case, second)] == ["CIUIC-J4"]


def test_last_words_are_compared_when_nobody_can_be_asked_any_more():
    case, _ = _case()
    rule = CallOrder()
    for rank, name in ((0, "a"), (1, "b")):
        words = {CALLS: {"0": [[1, name.encode()]]}, HISTORY: {"0": {"calls": _rows(name), "recorder": []}}}
        case.byes[rank] = Bye(rank=rank, step=1, how="end", facts=words)
        case.gone[rank] = "end"
        found = list(rule.left(case, rank, "end"))
    assert [each.code for each in found] == ["CIUIC-J2"]


def test_equal_calls_in_different_steps_are_told_apart():
    first = steps_differ({0: _rows("a", "a", steps=[1, 9]), 1: _rows("a", "a", steps=[1, 11])})
    assert first is not None
    assert first[0] == 2


def test_the_two_ends_of_a_send_make_different_calls():
    case, asked = _case()
    rule = CallOrder()
    for rank, name in ((0, "send"), (1, "recv")):
        facts = {"group": "0", "number": 0, "name": name, "detail": "", "site": "p.py:1 in f", "step": 0, "ranks": []}
        assert list(rule.notice(case, Notice(rank=rank, step=0, kind=NEW_CALL, facts=facts))) == []
    assert asked == []

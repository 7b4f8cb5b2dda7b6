import struct
from typing import Any

import pytest
from doctor_rounds import Room
from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.facts_model import MODE
from ciuic.doctor.facts_training import FORM, LOSS, PROJECTIONS, REDUCED, WEIGHTS_REDUCED, WITNESS
from ciuic.doctor.finding import Severity
from ciuic.doctor.rules.gains import multiple
from ciuic.doctor.rules.scale import Scale

LOCAL = {0: (1.0, -2.0, 0.5, 3.0), 1: (0.2, 1.0, -4.0, 1.5)}
MEAN = tuple((a + b) / 2 for a, b in zip(LOCAL[0], LOCAL[1], strict=True))
STEPS = (1, 2, 3, 4, 10, 20)


def _pack(values: Any, factor: float = 1.0) -> bytes:
    return struct.pack(f"<{PROJECTIONS}f", *(factor * value for value in values))


def _ddp(gain: float, expected: float = 1.0) -> list[Any]:
    return [3, _pack(MEAN), _pack(MEAN, gain * expected), expected, "ddp"]


def _by_hand(rank: int, gain: float) -> list[Any]:
    return [3, _pack(LOCAL[rank]), _pack(MEAN, gain), 1.0, "plain"]


def _form(micro: int = 1, product: float = 1.0, kind: str = "mean", labels: int = 8, divided: int = -1) -> list[Any]:
    divisor = labels / (micro * product) if kind == "mean" else 1.0 / product
    return [micro, product, kind, labels, divided, divisor, divisor]


def _run(facts: Any, *, world: int = 2) -> Room:
    room = Room(Scale(), world=world)
    for step in STEPS:
        room.step(step, facts)
    return room


def _codes(room: Room) -> set[str]:
    return {finding.code for finding in room.found if finding.severity is not Severity.NOTE}


def test_a_sum_of_ddps_means_is_a_double_reduction_and_names_the_call():
    calls = [12, "SUM", "head.weight", "train.py:31 in main", 1, 2]
    room = _run({WITNESS: _ddp(2.0, expected=0.25), FORM: _form(), REDUCED: calls})
    assert _codes(room) == {"CIUIC-E3"}
    assert room.found[0].modules == ("head.weight",)
    assert "train.py:31" in room.found[0].cause
    assert room.found[0].step == 1


def test_a_double_reduction_is_seen_without_any_call_that_was_watched():
    assert _codes(_run({WITNESS: _ddp(2.0)})) == {"CIUIC-E3"}


def test_one_odd_step_is_no_finding():
    room = Room(Scale())
    room.step(1, {WITNESS: _ddp(2.0)})
    room.step(2, {WITNESS: _ddp(1.0)})
    assert not room.found


def test_averaging_twice_changes_nothing_and_is_a_note():
    room = _run({WITNESS: _ddp(1.0), REDUCED: [1, "AVG", "a", "t.py:1 in f", 1, 2]})
    assert {(f.code, f.severity) for f in room.found} == {("CIUIC-E3", Severity.NOTE)}


@pytest.mark.parametrize("expected", [1.0, 0.01, 1 / 65536])
def test_clipping_and_unscaling_are_no_reduction(expected: float):
    assert not _run({WITNESS: _ddp(1.0, expected), FORM: _form()}).found


def test_a_manual_sum_is_found_and_a_manual_mean_is_not():
    summed = _run({rank: {WITNESS: _by_hand(rank, 2.0), FORM: _form()} for rank in range(2)})
    assert _codes(summed) == {"CIUIC-E4"}
    mean = _run({rank: {WITNESS: _by_hand(rank, 1.0), FORM: _form()} for rank in range(2)})
    assert not mean.found


@pytest.mark.parametrize("form", [_form(kind="sum", product=1 / 16, labels=0), _form(product=0.5), _form(4, 1 / 8)])
def test_a_sum_over_ranks_is_right_for_a_loss_that_is_a_sum_or_was_divided_before(form: list[Any]):
    assert not _run({rank: {WITNESS: _by_hand(rank, 2.0), FORM: form} for rank in range(2)}).found


def test_ranks_that_are_not_synchronised_are_no_question_of_scale():
    facts = {rank: {WITNESS: [3, _pack(LOCAL[rank]), _pack(LOCAL[rank]), 1.0, "plain"]} for rank in range(2)}
    assert not _run(facts).found


def test_weights_that_are_summed_are_found_when_all_ranks_have_told():
    room = Room(Scale())
    facts = {"number": 1, "after": _pack(MEAN, 2.0), "parameter": "inner", "site": "avg.py:3 in f", "ranks": [0, 1]}
    assert not room.notice(0, WEIGHTS_REDUCED, step=5, before=_pack(LOCAL[0]), **facts)
    found = room.notice(1, WEIGHTS_REDUCED, step=5, before=_pack(LOCAL[1]), **facts)
    assert [finding.code for finding in found] == ["CIUIC-E4"]


def test_weights_that_are_averaged_are_not():
    room = Room(Scale())
    facts = {"number": 1, "after": _pack(MEAN), "parameter": "inner", "site": "avg.py:3 in f", "ranks": [0, 1]}
    for rank in range(2):
        room.notice(rank, WEIGHTS_REDUCED, step=5, before=_pack(LOCAL[rank]), **facts)
    assert not room.found


@pytest.mark.parametrize(("divided", "product", "text"), [(0, 1.0, "never divided"), (2, 1 / 16, "divided twice")])
def test_a_wrong_division_by_the_micro_batches_is_found(divided: int, product: float, text: str):
    room = _run({WITNESS: _ddp(1.0), FORM: _form(4, product, divided=divided)})
    assert _codes(room) == {"CIUIC-E1"}
    assert text in room.found[0].cause


def test_a_division_of_the_gradients_by_hand_counts():
    assert not _run({WITNESS: _ddp(0.25), FORM: _form(4, 1.0, divided=0)}).found
    assert _codes(_run({WITNESS: _ddp(0.25), FORM: _form(4, 0.25, divided=1)})) == {"CIUIC-E1"}


@pytest.mark.parametrize("form", [_form(4, 0.25, divided=1), _form(1, 1.0), _form(4, 0.3, divided=-1)])
def test_right_and_unknown_divisions_are_no_finding(form: list[Any]):
    assert not _run({WITNESS: _ddp(1.0), FORM: form}).found


def test_a_division_on_one_process_alone_is_judged_too():
    assert _codes(_run({0: {WITNESS: _ddp(1.0), FORM: _form(2, 1.0, divided=0)}}, world=1)) == {"CIUIC-E1"}


def test_a_sum_by_a_communication_hook_is_named_as_its():
    room = _run({rank: {WITNESS: _by_hand(rank, 2.0), FORM: _form(), MODE: "ddp"} for rank in range(2)})
    assert _codes(room) == {"CIUIC-E4"}
    assert "communication hook" in room.found[0].cause


def _alone(rank: int, counted: tuple[int, ...], world: int) -> list[Any]:
    """WITNESS where only the gradients of some ranks were summed."""
    own = [tuple((3 * at + 7 * each) % 11 - 5.0 for at in range(PROJECTIONS)) for each in range(world)]
    after = [sum(own[each][at] for each in counted) / world for at in range(PROJECTIONS)]
    return [3, _pack(own[rank]), _pack(after), 1.0, "plain"]


@pytest.mark.parametrize(
    ("counted", "world", "lost"),
    [((0,), 2, (1,)), ((2,), 3, (0, 1)), ((0, 2), 3, (1,)), ((0, 1, 3), 4, (2,)), ((0, 1), 2, ()), ((0, 1, 2), 3, ())],
)
def test_ranks_whose_gradients_do_not_count_are_named(counted: tuple[int, ...], world: int, lost: tuple[int, ...]):
    room = _run({rank: {WITNESS: _alone(rank, counted, world)} for rank in range(world)}, world=world)
    assert [(f.code, f.ranks) for f in room.found if f.code == "CIUIC-A8"][:1] == ([("CIUIC-A8", lost)] if lost else [])


@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=4, unique=True))
def test_weights_of_the_ranks_that_are_not_zero_are_no_lost_rank(weights: list[float]):
    world = len(weights)
    own = [tuple((3 * at + 7 * each) % 11 - 5.0 for at in range(PROJECTIONS)) for each in range(world)]
    after = [sum(w * own[each][at] for each, w in enumerate(weights)) for at in range(PROJECTIONS)]
    room = _run({r: {WITNESS: [3, _pack(own[r]), _pack(after), 1.0, "plain"]} for r in range(world)}, world=world)
    assert "CIUIC-A8" not in _codes(room)


def test_a_rank_without_any_label_is_no_question_of_weights():
    assert not _run({0: {FORM: _form(labels=60), LOSS: 1.0}, 1: {FORM: _form(labels=4), LOSS: 0.0}}).found


def test_few_labels_on_one_rank_are_found_and_the_rank_is_named():
    room = _run({0: {FORM: _form(labels=60)}, 1: {FORM: _form(labels=4)}})
    assert _codes(room) == {"CIUIC-E2"}
    assert room.found[0].ranks == (1,)
    assert "60 on rank 0, 4 on rank 1" in room.found[0].cause


def test_a_sum_divided_by_the_ranks_own_count_is_the_same_fault():
    few, many = _form(kind="sum", product=1 / 4, labels=0), _form(kind="sum", product=1 / 60, labels=0)
    assert _codes(_run({0: {FORM: many}, 1: {FORM: few}})) == {"CIUIC-E2"}


def test_a_sum_divided_by_the_global_count_is_right():
    form = _form(kind="sum", product=1 / 64, labels=0)
    assert not _run({0: {FORM: form}, 1: {FORM: form}}).found


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=6, max_size=6))
def test_labels_that_overlap_between_ranks_are_no_finding(counts: list[tuple[int, int]]):
    room = Room(Scale())
    for step, (one, other) in zip(STEPS, counts, strict=True):
        room.step(step, {0: {FORM: _form(labels=one)}, 1: {FORM: _form(labels=other)}})
    ones, others = [pair[0] for pair in counts[:5]], [pair[1] for pair in counts[:5]]
    apart = min(ones) > max(others) or min(others) > max(ones)
    assert apart or not room.found


@given(st.floats(0.001, 1000), st.lists(st.floats(-10, 10), min_size=4, max_size=4))
def test_a_multiple_is_recognised(factor: float, values: list[float]):
    if sum(value * value for value in values) < 1e-6:
        return
    found = multiple([factor * value for value in values], values)
    assert found == pytest.approx(factor, rel=1e-6)


def test_what_is_no_multiple_is_none():
    assert multiple(LOCAL[0], LOCAL[1]) is None
    assert multiple((0, 0, 0, 0), LOCAL[1]) is None


def test_a_wrong_divisor_is_a_warning_once_it_has_stayed_the_same():
    room = Room(Scale())
    for step in STEPS:
        room.step(step, {rank: {WITNESS: _by_hand(rank, 0.25), FORM: _form()} for rank in (0, 1)})
    assert {(f.code, f.severity) for f in room.found} == {("CIUIC-E4", Severity.WARNING)}
    assert "divided by 8" in room.found[0].cause


def test_gains_that_change_or_that_the_loss_may_explain_are_no_wrong_divisor():
    changing, explained = Room(Scale()), Room(Scale())
    for at, step in enumerate(STEPS):
        changing.step(step, {r: {WITNESS: _by_hand(r, 0.25 + 0.1 * at), FORM: _form()} for r in (0, 1)})
        explained.step(step, {r: {WITNESS: _by_hand(r, 0.25), FORM: _form(product=4.0)} for r in (0, 1)})
    assert not changing.found
    assert not explained.found

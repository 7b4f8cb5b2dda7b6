"""How often fragments of experts are pushed: by the tokens that reach them, in whole intervals, and steadily."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.hub.run.expert_access import LARGEST_STRETCH, Access, averaged, stretch
from ciuic.ledger.layout import Layout, Slice, Tensor, make_layout


def layout(*experts: int) -> Layout:
    """Fragment 0 without experts, then so many experts in each."""
    tensors, row = [Tensor(name="norm", shape=(5,), dtype="float32", section="small")], 0
    for fragment, count in enumerate(experts, start=1):
        part = Slice(of="mlp.experts.up", start=row, stop=row + count, rows=sum(experts))
        shape = (count, 3, 2)
        tensors.append(
            Tensor(name=part.name, part=part, shape=shape, dtype="float32", section="small", fragment=fragment)
        )
        row += count
    return make_layout(tensors, len(experts) + 1)


@pytest.mark.parametrize(
    ("wanted", "stretched"), [(0.2, 1), (1.0, 1), (1.6, 1), (1.8, 2), (2.6, 3), (3.6, 4), (50.0, 4), (float("inf"), 4)]
)
def test_a_fragment_is_pushed_less_often_by_a_whole_number_from_1_to_4(wanted: float, stretched: int) -> None:
    assert stretch(wanted, 1) == stretched


@given(wanted=st.floats(0, 100), now=st.integers(1, LARGEST_STRETCH))
def test_a_stretch_once_chosen_stays_while_nothing_changes(wanted: float, now: int) -> None:
    chosen = stretch(wanted, now)
    assert 1 <= chosen <= LARGEST_STRETCH
    assert stretch(wanted, chosen) == chosen


def test_noise_around_a_border_does_not_change_it_back_and_forth() -> None:
    assert {stretch(wanted, 1) for wanted in (1.4, 1.55, 1.65)} == {1}
    assert {stretch(wanted, 2) for wanted in (1.4, 1.55, 1.65, 2.6)} == {2}


def test_accesses_count_by_expert_not_by_fragment() -> None:
    access = Access(layout(4, 2))
    access.hear({1: 2.0, 2: 1.0})  # each expert is reached by every second token
    assert access.stretches == []
    access.hear({1: 2.0, 2: 0.2})
    assert access.stretches == [1, 1, 4]  # mean 2.2 / 6, here 0.1 per token


def test_a_fragment_that_nothing_is_known_of_is_pushed_as_often_as_the_others() -> None:
    access = Access(layout(2, 2, 2))
    assert access.stretches == []
    access.hear({0: None, 1: 1.9, 2: 0.1, 3: None})
    assert access.stretches == [1, 1, 4, 1]
    assert access.share(3) is None
    assert access.share(1) == pytest.approx(0.95)


def test_a_fragment_on_its_way_keeps_what_was_known_of_it() -> None:
    access = Access(layout(2, 2))
    access.hear({1: 1.5, 2: 0.5})
    before = access.stretches
    access.hear({1: 1.5, 2: None})
    assert access.stretches == before == [1, 1, 2]


def test_experts_that_no_token_reaches_have_the_largest_stretch() -> None:
    access = Access(layout(2, 2))
    access.hear({1: 2.0, 2: 0.0})
    assert access.stretches == [1, 1, 4]
    access.hear({1: 0.0, 2: 0.0})
    assert access.stretches == []


def test_a_node_that_claims_too_much_is_taken_for_every_token() -> None:
    access = Access(layout(2, 2))
    access.hear({1: 1e15, 2: 1.0})
    assert access.share(1) == pytest.approx(2 / 3)
    assert access.stretches == []


def test_a_layout_without_experts_has_no_stretches() -> None:
    access = Access(layout())
    assert not access.has_experts
    assert access.stretches == []


def test_the_average_follows_the_latest_pushes_and_leaves_out_those_that_do_not_know() -> None:
    assert averaged(None, -1, 10) is None
    assert averaged(None, 5, 10) == 0.5
    assert averaged(0.5, -1, 10) == 0.5
    assert averaged(0.5, 0, 10) == pytest.approx(0.4)

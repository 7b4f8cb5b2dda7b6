"""IntervalSet against a plain set of integers."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ciuic.ledger.intervals import IntervalSet

NUMBERS = st.integers(0, 60)
RANGES = st.tuples(NUMBERS, NUMBERS)
COMMANDS = st.lists(st.tuples(st.sampled_from(["add", "remove", "within", "take"]), RANGES), max_size=40)


def members(intervals: IntervalSet) -> set[int]:
    return {n for start, stop in intervals for n in range(start, stop)}


def check_form(intervals: IntervalSet) -> None:
    """Sorted, disjoint, not adjacent, none empty."""
    ranges = list(intervals)
    assert all(start < stop for start, stop in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))


@given(commands=COMMANDS)
def test_any_commands_do_what_they_do_to_a_set(commands: list[tuple[str, tuple[int, int]]]) -> None:
    ours, model = IntervalSet(), set()
    for command, (a, b) in commands:
        numbers = set(range(a, b))
        match command:
            case "add":
                assert ours.add(a, b) == len(model & numbers)
                model |= numbers
            case "remove":
                ours.remove(a, b)
                model -= numbers
            case "within":
                inside = IntervalSet(ours.within(a, b))
                assert list(inside) == ours.within(a, b)
                assert members(inside) == model & numbers
            case _:
                taken = [n for start, stop in ours.take(b) for n in range(start, stop)]
                assert taken == sorted(model)[:b]
                model -= set(taken)
        assert members(ours) == model
        assert len(ours) == len(model)
        assert bool(ours) == bool(model)
        check_form(ours)


@given(ranges=st.lists(RANGES, max_size=10), order=st.randoms())
def test_sets_are_equal_however_they_came_about(ranges: list[tuple[int, int]], order) -> None:
    shuffled = ranges.copy()
    order.shuffle(shuffled)
    assert IntervalSet(ranges) == IntervalSet(shuffled)
    assert (IntervalSet(ranges) == IntervalSet([*ranges, (70, 71)])) is False


@given(ranges=st.lists(RANGES, max_size=10), more=RANGES)
def test_a_copy_is_another_set(ranges: list[tuple[int, int]], more: tuple[int, int]) -> None:
    ours = IntervalSet(ranges)
    before, copy = list(ours), ours.copy()
    copy.add(*more)
    copy.take(3)
    assert list(ours) == before


def test_a_set_may_be_changed_while_it_is_walked() -> None:
    ours = IntervalSet([(0, 2), (4, 6), (8, 10)])
    for start, stop in ours:
        ours.remove(start, stop)
    assert not ours

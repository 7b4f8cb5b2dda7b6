"""When a round closes, which pushes it takes, and how the deadline learns from arrivals."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_frames import push_of

from ciuic.ledger.entry import Push
from ciuic.ledger.inbox import Inbox, Policy


def push(node: str, sequence: int = 1, base: int = 0, incarnation: int = 1) -> Push:
    return push_of(node=node, sequence=sequence, base_version=base, incarnation=incarnation)


def inbox(**policy: float | str) -> Inbox:
    return Inbox(Policy(**policy))  # type: ignore[arg-type]


def close(box: Inbox, version: int = 0) -> list[tuple[str, int]]:
    """Close the round; (node, sequence) of what merged."""
    merged, rejected = box.select(version)
    box.settle([p.key for p in merged])
    for r in rejected:
        box.remove((r.node, r.incarnation, r.sequence))
    return [(p.header.node, p.header.sequence) for p in merged]


# ---- complete


def test_nothing_waits_nothing_closes() -> None:
    box = inbox(deadline_s=1.0)
    assert box.decide([], 1e9) == ""
    assert box.decide(["n0"], 1e9) == ""
    assert box.due_s() is None


def test_a_round_is_complete_when_every_expected_member_has_pushed() -> None:
    box = inbox()
    box.add(push("n0"), 10.0, late=False)
    assert box.decide(["n0", "n1"], 10.0) == ""
    box.add(push("n1"), 10.1, late=False)
    assert box.decide(["n0", "n1"], 10.1) == "complete"
    assert close(box) == [("n0", 1), ("n1", 1)]
    assert not box.waiting


def test_a_round_is_complete_when_the_missing_member_is_not_expected_any_more() -> None:
    box = inbox()
    box.add(push("n0"), 10.0, late=False)
    assert box.decide(["n0"], 10.0) == "complete"
    assert box.decide([], 10.0) == "complete"  # the pusher itself has left: what it pushed still counts


def test_pushes_of_nodes_that_are_not_expected_do_not_complete_a_round() -> None:
    box = inbox()
    box.add(push("joiner"), 10.0, late=False)
    assert box.decide(["n0"], 10.0) == ""
    assert box.has_from("joiner")
    assert not box.has_from("n0")


# ---- deadline and fraction


@pytest.mark.parametrize(
    ("members", "fraction", "needed"),
    [(1, 0.67, 1), (2, 0.67, 1), (3, 0.67, 2), (4, 0.67, 3), (2, 1.0, 2), (3, 1.0, 3), (3, 0.1, 1), (10, 0.67, 7)],
)
def test_a_deadline_closes_a_round_with_this_many_of_its_members(members: int, fraction: float, needed: int) -> None:
    names = [f"n{i}" for i in range(members)]
    box = inbox(min_fraction=fraction, deadline_s=5.0)
    for count, name in enumerate(names[:-1], start=1):
        box.add(push(name), 100.0, late=False)
        assert box.decide(names, 104.9) == ""
        assert box.decide(names, 105.0) == ("deadline" if count >= needed else "")
    box.add(push(names[-1]), 100.0, late=False)
    assert box.decide(names, 100.0) == "complete"


def test_the_fraction_counts_expected_members_only() -> None:
    box = inbox(min_fraction=0.67, deadline_s=1.0)
    box.add(push("n0"), 0.0, late=False)
    box.add(push("joiner"), 0.0, late=False)
    assert box.decide(["n0", "n1", "n2"], 99.0) == ""


def test_the_clock_starts_with_the_first_push_of_the_round() -> None:
    box = inbox(deadline_s=5.0)
    box.add(push("n0"), 100.0, late=False)
    box.add(push("n1"), 104.0, late=False)
    assert box.due_s() == 105.0
    close(box)
    assert box.due_s() is None
    box.add(push("n0", 2), 200.0, late=False)
    assert box.due_s() == 205.0


# ---- the adaptive deadline


def after_rounds(lateness: list[float]) -> Inbox:
    """An inbox that saw one round per lateness: a first push, and one that came so much later."""
    box = inbox()
    for number, late_s in enumerate(lateness, start=1):
        start = 1000.0 * number
        box.add(push("n0", number), start, late=False)
        box.add(push("n1", number), start + late_s, late=False)
        close(box)
    return box


def test_until_enough_arrivals_were_seen_the_deadline_is_long() -> None:
    assert inbox().deadline_s() == 30.0
    assert after_rounds([0.1] * 3).deadline_s() == 30.0
    assert after_rounds([0.1] * 4).deadline_s() == 0.5  # the floor


def test_the_deadline_is_the_median_and_four_times_the_spread() -> None:
    assert after_rounds([1.0, 2.0, 3.0, 4.0, 5.0]).deadline_s() == pytest.approx(3.0 + 4 * 1.0)


@given(lateness=st.lists(st.floats(0, 100), min_size=4, max_size=100))
def test_the_deadline_follows_the_latest_arrivals(lateness: list[float]) -> None:
    seen = lateness[-64:]
    middle = median(seen)
    expected = max(0.5, middle + 4 * median(abs(x - middle) for x in seen))
    assert after_rounds(lateness).deadline_s() == pytest.approx(expected, abs=1e-6)


def test_one_straggler_among_many_does_not_move_the_deadline() -> None:
    usual = [1.0, 1.1, 0.9, 1.0, 1.2, 0.8, 1.0, 1.0]
    assert after_rounds([*usual, 500.0]).deadline_s() < 2.0


def test_a_fixed_deadline_does_not_learn() -> None:
    box = Inbox(Policy(deadline_s=7.0))
    for number in range(1, 9):
        box.add(push("n0", number), 100.0 * number, late=False)
        box.add(push("n1", number), 100.0 * number + 20, late=False)
        close(box)
    assert box.deadline_s() == 7.0


# ---- late pushes


def test_a_late_push_waits_for_the_next_round_and_does_not_start_its_clock() -> None:
    box = inbox(deadline_s=5.0)
    box.add(push("n0"), 100.0, late=False)
    assert box.decide(["n0", "n1"], 105.0) == "deadline"
    close(box)
    box.add(push("n1"), 107.0, late=True)
    assert box.due_s() is None
    assert box.decide(["n0", "n1"], 1e9) == ""
    box.add(push("n0", 2, base=1), 200.0, late=False)
    assert box.due_s() == 205.0
    assert box.decide(["n0", "n1"], 200.0) == "complete"
    assert close(box, version=1) == [("n0", 2), ("n1", 1)]


def test_a_late_push_teaches_the_deadline_how_late_it_was() -> None:
    box = inbox()
    for number in range(1, 6):
        start = 1000.0 * number
        box.add(push("n0", number), start, late=False)
        close(box)
        box.add(push("n1", number), start + 40.0, late=True)
    assert box.deadline_s() == pytest.approx(40.0)


def test_a_late_push_of_the_very_first_round_is_taken() -> None:
    box = inbox()
    box.add(push("n0"), 5.0, late=True)
    assert box.due_s() is None
    assert box.decide(["n0"], 5.0) == "complete"


# ---- what a round takes


def test_a_round_merges_one_push_per_node_the_oldest_and_keeps_the_others() -> None:
    box = inbox()
    box.add(push("n0", 9, incarnation=1), 0.0, late=False)  # of an incarnation that died after it
    box.add(push("n0", 1, incarnation=2), 0.1, late=False)
    box.add(push("n1", 4), 0.2, late=False)
    assert close(box) == [("n0", 9), ("n1", 4)]
    assert list(box.waiting) == [("n0", 2, 1)]
    assert box.decide(["n0"], 0.3) == "complete"
    assert close(box, version=1) == [("n0", 1)]


@pytest.mark.parametrize(("version", "merges"), [(4, True), (5, False)])
def test_a_push_that_became_too_old_while_it_waited_is_rejected(version: int, merges: bool) -> None:
    box = inbox(max_staleness=4)
    box.add(push("n0", base=0), 0.0, late=True)
    box.add(push("n1", base=version), 0.0, late=False)
    merged, rejected = box.select(version)
    assert [p.header.node for p in merged] == (["n0", "n1"] if merges else ["n1"])
    assert [(r.node, r.reason) for r in rejected] == ([] if merges else [("n0", "stale")])


def test_a_round_of_pushes_that_are_all_too_old_still_closes() -> None:
    box = inbox(max_staleness=2)
    box.add(push("n0", base=3), 0.0, late=True)
    box.add(push("n1", base=1), 0.0, late=True)
    assert box.decide(["n0", "n1"], 1.0) == "complete"
    merged, rejected = box.select(10)
    assert [p.header.node for p in merged] == ["n0", "n1"]
    assert rejected == ()


@given(
    waiting=st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(1, 3)), st.integers(0, 9), min_size=1
    ),
    version=st.integers(9, 14),
    max_staleness=st.integers(0, 5),
)
def test_each_push_is_merged_rejected_or_kept_and_a_round_is_never_empty(
    waiting: dict[tuple[str, int, int], int], version: int, max_staleness: int
) -> None:
    box = inbox(max_staleness=max_staleness)
    for (node, incarnation, sequence), base in waiting.items():
        box.add(push(node, sequence, base, incarnation), 0.0, late=False)
    merged, rejected = box.select(version)
    keys = [p.key for p in merged]
    refused = [(r.node, r.incarnation, r.sequence) for r in rejected]
    assert keys
    assert keys == sorted(keys)
    assert len({node for node, _, _ in keys}) == len(keys)
    assert not set(keys) & set(refused)
    for key in refused:
        assert version - waiting[key] > max_staleness
        box.remove(key)
    box.settle(keys)
    assert set(box.waiting) == set(waiting) - set(keys) - set(refused)
    for key in box.waiting:
        assert any(other[0] == key[0] and other < key for other in keys), "kept without an older one before it"


# ---- async


def test_in_async_one_fresh_push_of_each_node_weighs_as_much_as_a_round_of_sync() -> None:
    box = inbox(kind="async")
    for at_work in (1, 2, 4, 8):
        total = 0.0
        for number in range(at_work):
            one = push(f"n{number}", base=number)
            total += box.weights([one], number, at_work)[one.key]
        assert total == pytest.approx(1.0, abs=1e-6)


def test_in_async_stale_work_counts_less_and_never_more_than_its_share() -> None:
    box = inbox(kind="async")
    weights = []
    for behind in range(5):
        one = push("n0", base=10 - behind)
        weights.append(box.weights([one], 10, 4)[one.key])
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == 0.25
    assert weights[3] == pytest.approx(0.125)


def test_in_async_staleness_counts_rounds_of_as_many_entries_as_there_are_nodes() -> None:
    box = inbox(kind="async", max_staleness=2)
    assert box.policy.staleness_limit(8) == 16
    assert inbox(max_staleness=2).policy.staleness_limit(8) == 2
    box.add(push("n0", base=0), 1.0, late=False)
    box.add(push("n1", base=20), 1.0, late=False)
    merged, rejected = box.select(16, 8)
    assert ([p.header.node for p in merged], rejected) == (["n0"], ())
    merged, rejected = box.select(17, 8)
    assert [p.header.node for p in merged] == ["n1"]
    assert [r.node for r in rejected] == ["n0"]


def test_in_async_the_push_that_has_waited_longest_goes_first() -> None:
    box = inbox(kind="async")
    box.add(push("z"), 1.0, late=False)
    box.add(push("a"), 2.0, late=False)
    assert box.decide(["a", "z"], 2.0) == "pushed"
    assert close(box) == [("z", 1)]
    assert close(box) == [("a", 1)]

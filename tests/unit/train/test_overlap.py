"""Wait for an entry while that is cheaper than working on an old base, and never longer than that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.plan.predict import WAIT_SHARE
from ciuic.train.overlap import PATIENCE, WaitRule

TIMES = st.lists(st.floats(0.001, 1000), min_size=1, max_size=20)


def rule(rounds: list[float], flights: list[float], **options: bool) -> WaitRule:
    made = WaitRule(**options)  # type: ignore[arg-type]
    for seconds in rounds:
        made.observe_round(seconds)
    for seconds in flights:
        made.observe_flight(seconds)
    return made


def test_before_anything_was_measured_nobody_waits() -> None:
    assert rule([], []).budget_s() == 0
    assert rule([10.0], []).budget_s() == 0
    assert rule([], [0.1]).budget_s() == 0


def test_a_fast_link_is_waited_for_with_some_patience() -> None:
    assert rule([40.0] * 3, [0.5] * 3).budget_s() == pytest.approx(0.75)


def test_a_slow_link_is_overlapped() -> None:
    assert rule([10.0] * 3, [2.0] * 3).budget_s() == 0


def test_the_share_decides_of_the_whole_round() -> None:
    just = WAIT_SHARE / (1 - WAIT_SHARE) * 10.0
    assert rule([10.0], [just * 0.999]).budget_s() > 0
    assert rule([10.0], [just * 1.001]).budget_s() == 0


def test_one_outlier_changes_nothing_and_a_lasting_change_everything() -> None:
    usual = [0.5] * 5
    assert rule([40.0] * 5, [*usual, 100.0]).budget_s() > 0
    assert rule([40.0] * 5, [*usual, *[100.0] * 9]).budget_s() == 0
    assert rule([40.0] * 5, [*[100.0] * 9, *usual]).budget_s() > 0


@given(rounds=TIMES, flights=TIMES)
def test_a_dead_peer_costs_at_most_the_share(rounds: list[float], flights: list[float]) -> None:
    budget = rule(rounds, flights).budget_s()
    usual = sorted(rounds[-9:])
    assert 0 <= budget <= WAIT_SHARE / (1 - WAIT_SHARE) * usual[len(usual) // 2] * (1 + 1e-9)
    assert budget <= PATIENCE * max(flights[-9:])


@given(rounds=TIMES, flights=TIMES)
def test_a_job_may_always_overlap_or_always_wait(rounds: list[float], flights: list[float]) -> None:
    assert rule(rounds, flights, mode=True).budget_s() == 0
    assert rule(rounds, flights, mode=False).budget_s() == float("inf")

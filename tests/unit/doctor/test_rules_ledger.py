"""Class M from views made by hand: faults are found, clean runs are silent."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.rules.ledger import WINDOW, LedgerView, NodeView, judge

STEADY = (2.0, 2.1, 1.9, 2.05, 1.95, 2.0, 2.1, 1.9, 2.0, 2.0)


def run(*nodes: NodeView, **more: Any) -> list[tuple[str, tuple[str, ...]]]:
    found = judge(LedgerView(version=50, nodes=nodes, **more))
    return [(finding.code.removeprefix("CIUIC-"), finding.modules) for finding in found]


def node(name: str, **more: Any) -> NodeView:
    base: dict[str, Any] = {"losses": STEADY, "lags": (0, 1) * 10, "residuals": (0.4,) * 20}
    return NodeView(node=name, **{**base, **more})


def test_nodes_that_are_alike_give_nothing():
    assert run(node("a"), node("b"), node("c")) == []


def test_another_base_is_told_when_two_reports_in_a_row_differ():
    base = (41, "9f2a", "07be")
    assert run(node("a"), node("b", mismatches=1, base=base)) == []
    assert run(node("a"), node("b", mismatches=2, base=base)) == [("M1", ("b",))]


def test_a_worker_that_ended_because_of_its_base_is_told_although_a_new_one_trains():
    assert run(node("a"), node("b", bad_bases=1)) == [("M1", ("b",))]


def test_a_residual_that_grows_is_told_and_one_that_is_long_is_not():
    growing = tuple(0.5 * 1.2**push for push in range(20))
    assert run(node("a"), node("b", residuals=growing)) == [("M2", ("b",))]
    assert run(node("a"), node("b", residuals=(9.0,) * 20)) == []
    filling = tuple(9.0 * (1 - 0.8**push) for push in range(20))  # what top-k does at the start of a run
    assert run(node("a"), node("b", residuals=filling)) == []


def test_a_node_that_is_behind_all_the_time_is_told_and_one_that_catches_up_is_not():
    assert run(node("a"), node("b", lags=(7,) * WINDOW)) == [("M3", ("b",))]
    assert run(node("a"), node("b", lags=(*range(20, 4, -1), 0, 0, 0, 0))) == []
    assert run(node("a", lags=(6,) * WINDOW), node("b", lags=(7,) * WINDOW)) == []
    assert run(node("b", lags=(7,) * WINDOW)) == []


def test_a_loss_far_from_the_others_is_told_with_the_node():
    far = tuple(loss + 2.2 for loss in STEADY)
    assert run(node("a"), node("b", losses=far), node("c")) == [("M4", ("b",))]
    assert run(node("a"), node("b", losses=far)) == [("M4", ("b",))]
    assert run(node("a"), node("b", losses=far[:5]), node("c")) == []
    assert run(node("a"), node("b", losses=far, is_training=False), node("c")) == []


def test_losses_that_swing_widely_on_all_nodes_are_no_finding():
    wild = (0.1, 4.0, 1.0, 3.0, 0.5, 2.5, 0.2, 3.5, 1.5, 2.0)
    assert run(node("a", losses=wild), node("b", losses=tuple(x + 1.2 for x in wild)), node("c", losses=wild)) == []


def test_samples_that_count_twice_are_told():
    assert run(node("a"), duplicated=3) == [("M5", ())]


@given(st.lists(st.lists(st.floats(0.9, 1.1), max_size=WINDOW), max_size=5))
def test_losses_within_a_tenth_are_never_a_finding(losses: list[list[float]]):
    nodes = [NodeView(node=str(at), losses=each, lags=(0,) * WINDOW) for at, each in enumerate(losses)]
    assert judge(LedgerView(version=1, nodes=nodes)) == []


@pytest.mark.parametrize("count", [0, 1])
def test_few_nodes_are_no_error(count: int):
    assert run(*[node("a") for _ in range(count)]) == []

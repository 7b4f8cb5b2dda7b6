"""Steps per push in proportion to speed."""

from hypothesis import given
from hypothesis import strategies as st

from ciuic.hub.run.pace import balanced_intervals


def busy(steps: dict[str, int], step_s: dict[str, float]) -> float:
    """Share of the time in which nodes train when all push together."""
    times = [steps[node] * step_s[node] for node in steps]
    return sum(times) / (len(times) * max(times))


def test_nodes_of_about_the_same_speed_keep_the_interval() -> None:
    assert balanced_intervals(8, {"a": 0.5, "b": 0.52, "c": 0.49}) == {"a": 8, "b": 8, "c": 8}


def test_a_node_whose_speed_is_not_known_keeps_the_interval() -> None:
    assert balanced_intervals(5, {"a": 0.0, "b": 0.2}) == {"a": 5, "b": 5}
    assert balanced_intervals(5, {"a": 0.0, "b": 0.2, "c": 0.8})["a"] == 5


def test_one_of_three_four_times_slower_wastes_nothing() -> None:
    step_s = {"a": 0.6, "b": 0.6, "c": 2.4}
    steps = balanced_intervals(8, step_s)
    assert steps == {"a": 12, "b": 12, "c": 3}
    assert busy(steps, step_s) == 1.0


def test_a_very_slow_node_makes_one_step() -> None:
    assert balanced_intervals(4, {"a": 0.1, "b": 10.0})["b"] == 1


@given(
    interval=st.integers(1, 64),
    step_s=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 3.0), min_size=2, max_size=6),
)
def test_every_node_has_at_least_one_step_and_nobody_waits_more_than_with_equal_intervals(
    interval: int, step_s: dict[str, float]
) -> None:
    steps = balanced_intervals(interval, step_s)
    assert steps.keys() == step_s.keys()
    assert min(steps.values()) >= 1
    assert busy(steps, step_s) >= busy(dict.fromkeys(step_s, interval), step_s) - 0.02

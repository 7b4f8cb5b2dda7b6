"""Global metric and early stopping of a process that is alone; with several ranks: tests/processes."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import TrainingLoopError, UsageError
from ciuic.torch import GlobalEarlyStopping, GlobalMetric


def test_batches_count_by_their_tokens_and_not_once_each() -> None:
    metric = GlobalMetric()
    metric.update(2.0, 30)
    metric.update(torch.tensor(5.0), torch.tensor(10))
    assert metric.compute() == 2.75


def test_a_tensor_of_values_is_as_many_terms() -> None:
    metric = GlobalMetric()
    metric.update(torch.tensor([1.0, 2.0, 6.0]))
    metric.update(1.0)
    assert metric.compute(reset=False) == 2.5
    assert metric.compute() == 2.5
    with pytest.raises(TrainingLoopError, match="no rank has a value"):
        metric.compute()


@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=600), cut=st.integers(0, 600))
def test_values_one_by_one_and_as_tensors_give_the_same_bits(values: list[float], cut: int) -> None:
    one, other = GlobalMetric("a"), GlobalMetric("b")
    for value in values:
        one.update(value)
    other.update(torch.tensor(values[:cut], dtype=torch.float32))
    for value in values[cut:]:
        other.update(torch.tensor(value, dtype=torch.float32), 1)
    assert one.compute() == other.compute()


def test_values_that_are_not_finite_are_told_with_the_rank() -> None:
    metric = GlobalMetric("validation loss")
    metric.update(torch.tensor([1.0, math.nan, math.inf]))
    with pytest.raises(TrainingLoopError, match="validation loss: 2 values of rank 0 are infinite or not a number"):
        metric.compute()


def test_a_state_goes_on_where_it_was_and_can_be_merged() -> None:
    metric, again, merged = GlobalMetric(), GlobalMetric(), GlobalMetric()
    metric.update(torch.tensor(1.0), 3)
    state = json.loads(json.dumps(metric.state_dict()))
    again.load_state_dict(state)
    again.update(5.0, 1)
    assert again.compute() == 2.0
    merged.merge(state)
    merged.merge(state)
    assert merged.compute() == 1.0
    with pytest.raises(UsageError, match="no state of the metric 'accuracy'"):
        GlobalMetric("accuracy").load_state_dict(state)


@pytest.mark.parametrize("count", [-1, 2.5, True, "3", torch.tensor([1, 2])])
def test_a_count_that_is_no_count_is_refused(count: object) -> None:
    with pytest.raises(TrainingLoopError, match="a count of"):
        GlobalMetric().update(1.0, count)  # ty: ignore[invalid-argument-type]


def test_several_values_with_one_count_are_refused() -> None:
    with pytest.raises(TrainingLoopError, match=r"\[2\] values with one count"):
        GlobalMetric().update(torch.tensor([1.0, 2.0]), 2)


def test_it_stops_after_patience_evaluations_without_improvement() -> None:
    stopping = GlobalEarlyStopping(patience=2, min_delta=0.1)
    verdicts = [stopping.step(value) for value in (1.0, 0.95, 0.8, math.nan, 0.75)]
    assert [verdict.best for verdict in verdicts] == [True, False, True, False, False]
    assert [verdict.stop for verdict in verdicts] == [False, False, False, False, True]
    assert verdicts[-1].best_value == 0.8
    assert verdicts[-1].best_step == 2


def test_larger_is_better_when_asked_for() -> None:
    stopping = GlobalEarlyStopping(patience=1, mode="max")
    assert stopping.step(torch.tensor(0.5)).best
    assert stopping.step(0.7).best
    assert stopping.step(0.6).stop


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=12), cut=st.integers(0, 12), patience=st.integers(1, 4))
def test_a_resumed_one_decides_as_if_nothing_had_happened(values: list[float], cut: int, patience: int) -> None:
    whole, before, after = (GlobalEarlyStopping(patience) for _ in range(3))
    expected = [whole.step(value) for value in values]
    found = [before.step(value) for value in values[:cut]]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert found + [after.step(value) for value in values[cut:]] == expected


@pytest.mark.parametrize("state", [{}, {"step": -1, "waited": 0, "stopped": False, "best": "0x1p0", "best_step": 0}])
def test_a_state_that_is_none_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="no state of an early stopping"):
        GlobalEarlyStopping(1).load_state_dict(state)


@pytest.mark.parametrize("options", [{"patience": 0}, {"patience": 1, "min_delta": -1.0}, {"patience": 1, "mode": "x"}])
def test_settings_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        GlobalEarlyStopping(**options)  # ty: ignore[invalid-argument-type]
    with pytest.raises(UsageError, match="not a name"):
        GlobalMetric("a/b/")

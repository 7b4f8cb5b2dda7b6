"""The loss table says what was measured."""

import pytest

from ciuic.plan.frontier import loss_cost, overlap_cost

DDP = 2.1423
MEASURED = [("int4", 2, 2.1744), ("2-bit", 2, 2.1823), ("int4", 4, 2.1998), ("2-bit", 4, 2.2011), ("1-bit", 5, 2.2369)]


@pytest.mark.parametrize(("codec", "interval", "loss"), MEASURED)
def test_rows_of_three_seeds_are_met(codec: str, interval: int, loss: float) -> None:
    assert loss_cost(codec, codec, interval) == pytest.approx(loss - DDP, abs=0.002)


@pytest.mark.parametrize(
    ("codec", "interval", "loss"),
    [("int4", 8, 2.2532), ("2-bit", 10, 2.2692), ("1-bit", 2, 2.2342), ("1-bit", 4, 2.2172), ("none", 5, 2.2212)],
)
def test_rows_of_one_seed_are_met_within_noise(codec: str, interval: int, loss: float) -> None:
    assert loss_cost(codec, codec, interval) == pytest.approx(loss - 2.1342, abs=0.025)


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "2-bit"])
def test_a_longer_interval_never_helps(codec: str) -> None:
    costs = [loss_cost(codec, codec, steps) for steps in range(1, 600)]
    assert costs == sorted(costs)


def test_one_bit_is_best_at_four_steps() -> None:
    costs = {steps: loss_cost("1-bit", "1-bit", steps) for steps in range(1, 600)}
    assert min(costs, key=lambda steps: costs[steps]) == 4


@pytest.mark.parametrize("interval", [1, 2, 5, 30, 500])
def test_fewer_bits_never_help(interval: int) -> None:
    costs = [loss_cost(name, name, interval) for name in ("none", "bf16", "int8", "int4", "2-bit", "1-bit", "topk")]
    assert costs == sorted(costs)


def test_two_codecs_cost_the_mean_of_both() -> None:
    both = loss_cost("1-bit", "int4", 5)
    assert loss_cost("int4", "int4", 5) < both < loss_cost("1-bit", "1-bit", 5)


def test_overlap_costs_what_was_measured_and_per_step_less_with_long_intervals() -> None:
    assert overlap_cost(5, 1.0) == pytest.approx(0.056)
    assert overlap_cost(20, 1.0) == pytest.approx(0.10, abs=0.01)
    assert overlap_cost(20, 0.25) == pytest.approx(0.03, abs=0.01)
    assert overlap_cost(5, 3.0) == overlap_cost(5, 1.0)
    per_step = [overlap_cost(steps, 1.0) / steps for steps in range(1, 501)]
    assert per_step == sorted(per_step, reverse=True)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.train.schedule import START, batch_factor, join_ramp, lr_factor, scheduled_factor

fractions = st.floats(0, 1)


@given(progress=st.floats(-1, 2), warmup=fractions, floor=fractions)
def test_factor_stays_between_nothing_and_one(progress: float, warmup: float, floor: float) -> None:
    assert 0.0 <= lr_factor(progress, warmup, floor) <= 1.0


@given(first=fractions, second=fractions, warmup=fractions)
def test_factor_rises_before_the_end_of_the_warmup_and_falls_after(first: float, second: float, warmup: float) -> None:
    early, late = sorted((first, second))
    if late < warmup:
        assert lr_factor(early, warmup) <= lr_factor(late, warmup)
    if early >= warmup:
        assert lr_factor(early, warmup) >= lr_factor(late, warmup)


def test_cosine_begins_low_but_not_at_zero_peaks_after_the_warmup_and_ends_at_the_floor() -> None:
    assert lr_factor(0.0, 0.2) == START > 0
    assert lr_factor(0.1, 0.2) == pytest.approx((1 + START) / 2)
    assert lr_factor(0.2, 0.2) == 1.0
    assert lr_factor(0.6, 0.2) == pytest.approx(0.55)
    assert lr_factor(1.0, 0.2) == pytest.approx(0.1)
    assert lr_factor(1.0, 0.2, floor=0.0) == pytest.approx(0.0)


def test_no_warmup_begins_at_the_peak_and_only_warmup_ends_there() -> None:
    assert lr_factor(0.0, 0.0) == 1.0
    assert lr_factor(1.0, 1.0) == 1.0


def test_constant_keeps_the_warmup() -> None:
    assert scheduled_factor("constant", 0.1, 0.2) == pytest.approx((1 + START) / 2)
    assert scheduled_factor("constant", 0.9, 0.2) == 1.0
    assert scheduled_factor("constant", 0.0, 0.0) == 1.0
    assert scheduled_factor("cosine", 1.0, 0.2) == pytest.approx(0.1)


def test_batch_of_four_times_the_size_gets_four_times_or_twice_the_rate() -> None:
    assert batch_factor("linear", 32, 8) == 4.0
    assert batch_factor("sqrt", 32, 8) == 2.0
    assert batch_factor(None, 32, 8) == batch_factor("linear", 8, 8) == 1.0


def test_ramp_of_a_joiner_reaches_one_after_ten_steps() -> None:
    assert join_ramp(0) == pytest.approx(0.1)
    assert join_ramp(9) == 1.0
    assert join_ramp(1000) == 1.0

"""Sums without rounding: any order and any grouping of the terms gives the same bits."""

import json
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.train.exact_sum import ExactSum

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TERMS = st.lists(st.tuples(FINITE, st.integers(0, 1 << 40)), min_size=1, max_size=12)


def summed(terms: list[tuple[float, int]]) -> ExactSum:
    total = ExactSum()
    for value, weight in terms:
        total.add(value, weight)
    return total


@given(terms=TERMS)
def test_the_mean_is_the_exact_one_rounded_once(terms: list[tuple[float, int]]) -> None:
    weight = sum(weight for _, weight in terms)
    total = summed(terms)
    if weight == 0:
        assert math.isnan(total.mean())
        return
    assert total.mean() == float(sum(Fraction(value) * count for value, count in terms) / weight)


@given(terms=TERMS, owners=st.lists(st.integers(0, 3), min_size=12, max_size=12), order=st.randoms())
def test_any_split_and_order_gives_the_same_sum(
    terms: list[tuple[float, int]], owners: list[int], order: random.Random
) -> None:
    parts = [ExactSum() for _ in range(4)]
    mixed = list(zip(terms, owners, strict=False))
    order.shuffle(mixed)
    for (value, weight), owner in mixed:
        parts[owner].add(value, weight)
    total = ExactSum()
    for part in parts:
        total.merge(ExactSum.from_dict(json.loads(json.dumps(part.to_dict()))))
    assert total == summed(terms)


def test_terms_that_cancel_leave_what_is_small() -> None:
    assert summed([(1e308, 1), (5e-324, 3), (-1e308, 1)]).mean() == 5e-324


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_term_that_is_not_finite_makes_the_mean_nan_and_is_counted(value: float) -> None:
    total = summed([(1.0, 1), (value, 2)])
    assert math.isnan(total.mean())
    assert total.not_finite == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"units": "zz", "weight": "1", "not_finite": 0},
        {"units": "1", "weight": "-1", "not_finite": 0},
        {"units": "1", "weight": "1", "not_finite": -1},
        {"units": "1" * 4096, "weight": "1", "not_finite": 0},
        {"units": 1, "weight": 1, "not_finite": 0},
    ],
    ids=["empty", "no-number", "negative-weight", "negative-count", "too-long", "no-text"],
)
def test_what_is_no_sum_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        ExactSum.from_dict(body)

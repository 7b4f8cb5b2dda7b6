"""The outer optimizer with delayed momentum (its undelayed form is compared with torch in test_aggregate)."""

import numpy as np

from ciuic.ledger.outer import OuterOptimizer


def run(outer: OuterOptimizer, means: list[np.ndarray]) -> list[np.ndarray]:
    state, updates = outer.start(len(means[0])), []
    for version, mean in enumerate(means, start=1):
        update, state = outer.step(mean.copy(), state, version)
        updates.append(update)
    return updates


def means(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.normal(size=5).astype(np.float32) for _ in range(count)]


def test_delayed_nesterov_is_the_published_recursion() -> None:
    lr, mu, period, given = 0.7, 0.9, 3, means(9)
    momentum, delta = np.zeros(5), np.zeros(5)
    for t, (mean, update) in enumerate(
        zip(given, run(OuterOptimizer(lr=lr, momentum=mu, delay=period), given), strict=True)
    ):
        delta = delta + mean
        if (t + 1) % period == 0:
            momentum = mu * momentum + delta
            expected = lr * (mu * momentum + mean)
            delta = np.zeros(5)
        else:
            expected = lr * mean
        assert np.allclose(update, expected, atol=1e-6)


def test_a_delay_of_one_is_plain_nesterov() -> None:
    given = means(6)
    plain, delayed = (
        run(OuterOptimizer(lr=0.5, momentum=0.8), given),
        run(OuterOptimizer(lr=0.5, momentum=0.8, delay=1), given),
    )
    assert all(np.array_equal(a, b) for a, b in zip(plain, delayed, strict=True))


def test_without_momentum_a_delay_changes_nothing_and_costs_no_memory() -> None:
    outer = OuterOptimizer(lr=1.0, delay=4)
    assert outer.start(10).delayed is None
    given = means(5)
    assert all(np.array_equal(a, b) for a, b in zip(run(outer, given), given, strict=True))

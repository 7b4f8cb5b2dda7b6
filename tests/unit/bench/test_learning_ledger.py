"""The learning benchmark's way through the ledger: what arrives, what it costs, and what is checked."""

import numpy as np
import pytest
import torch

from ciuic.bench.learning_ledger import Ledger, gradient_layout
from ciuic.bench.learning_quadratic import quadratic_errors
from ciuic.errors import DigestMismatchError, NonFiniteError
from ciuic.ledger.entry import Phase, StepFacts
from ciuic.ledger.layout import Layout, Tensor, make_layout

COUNT = 96 * 96


def layout() -> Layout:
    return make_layout([Tensor(name="x", shape=(96, 96), dtype="float32", section="coded")])


def drawn(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (rows, COUNT)).astype(np.float32)


def test_a_round_without_compression_is_the_mean_of_the_nodes() -> None:
    ledger = Ledger(layout(), np.zeros(COUNT, np.float32), "none", 4)
    theta = drawn(4)
    mean = theta.mean(axis=0)
    ledger.round(theta, 1)
    np.testing.assert_allclose(ledger.base, mean, atol=1e-6)
    assert all(np.array_equal(row, ledger.base) for row in theta)


def test_bytes_are_whole_frames_up_and_down() -> None:
    ledger = Ledger(layout(), np.zeros(COUNT, np.float32), "1-bit", 4)
    ledger.round(drawn(4), 1)
    payload = COUNT // 8 + 2 * 3  # a bit each, three blocks of 4096
    assert 8 * payload < ledger.sent_bytes < 8 * (payload + 1500)


def test_a_node_whose_base_differs_is_found_by_its_digest() -> None:
    ledger = Ledger(layout(), np.zeros(COUNT, np.float32), "int4", 2)
    ledger.nodes[1].replicas[0].base[7] += 1
    with pytest.raises(DigestMismatchError):
        ledger.round(drawn(2), 1)


def test_a_node_that_diverged_is_an_error() -> None:
    ledger = Ledger(layout(), np.zeros(COUNT, np.float32), "none", 2)
    theta = drawn(2)
    theta[1, 3] = np.inf
    with pytest.raises(NonFiniteError):
        ledger.round(theta, 1)


def facts(lr: float, phase: Phase = "adam", next_phase: Phase = "adam") -> StepFacts:
    return StepFacts(lr=lr, phase=phase, next_phase=next_phase)


def test_gradients_without_compression_are_adamw_on_the_mean() -> None:
    start = drawn(1)[0]
    ledger = Ledger(gradient_layout(layout(), feedback=False, freeze_at=1.0), start, "none", 4)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    reference = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    theta = np.tile(start, (4, 1))
    for step in range(3):
        gradients = drawn(4, step)
        ledger.step(gradients, theta, 1, facts(0.01))
        parameter.grad = torch.from_numpy(gradients.mean(axis=0))
        reference.step()
    torch.testing.assert_close(torch.from_numpy(ledger.base), parameter.detach(), rtol=1e-4, atol=1e-6)
    assert all(np.array_equal(row, ledger.base) for row in theta)


def test_onebit_adam_goes_on_from_the_warm_ups_momentum_at_a_quarter_of_its_bytes() -> None:
    ledger = Ledger(gradient_layout(layout(), feedback=True, freeze_at=0.2), np.zeros(COUNT, np.float32), "int4", 2)
    gradients, theta = np.tile(drawn(1), (2, 1)), np.zeros((2, COUNT), np.float32)
    costs, bases = [], []
    for step in range(30):
        before = ledger.sent_bytes
        ledger.step(gradients, theta, 1, facts(0.01, ledger.hub.phase, "frozen" if step >= 4 else "adam"))
        costs.append(ledger.sent_bytes - before)
        bases.append(ledger.base.copy())
    assert costs[5] < 0.4 * costs[4]
    moved = bases[-1] - bases[4]
    assert float(np.mean(np.sign(moved) == -np.sign(gradients[0]))) > 0.95


def test_error_feedback_reaches_the_optimum_of_two_unlike_workers_and_the_naive_formula_does_not() -> None:
    with_feedback, naive = quadratic_errors()
    assert with_feedback < 0.01
    assert naive > 0.3

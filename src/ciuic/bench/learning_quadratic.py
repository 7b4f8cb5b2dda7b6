"""Two workers whose optima differ: what one bit does with error feedback and without.

Worker i minimises the sum over j of a_ij (x_j - c_ij)^2 / 2. At the common optimum x*_j = sum_i a_ij c_ij / sum_i a_ij
the two gradients cancel, but neither is zero, and their signs and mean magnitudes alone do not say so.
"""

import numpy as np
from numpy.typing import NDArray

from ciuic.bench.learning_ledger import Ledger
from ciuic.codec import FragmentCodec
from ciuic.ledger.layout import Layout, Tensor, make_layout

SIDE, STEPS, RATE = 16, 1500, 0.1
Float = NDArray[np.float32]


def quadratic_errors(seed: int = 0) -> tuple[float, float]:
    """(error with feedback through the ledger, error of the naive formula): distance to x* over that of the start."""
    draw = np.random.default_rng(seed)
    curvature = draw.uniform(0.5, 1.5, (2, SIDE * SIDE)).astype(np.float32)
    centre = draw.uniform(-1, 1, (2, SIDE * SIDE)).astype(np.float32)
    optimum = (curvature * centre).sum(axis=0) / curvature.sum(axis=0)
    far = float(np.linalg.norm(optimum))
    found = (_with_feedback(curvature, centre), _naive(curvature, centre))
    with_feedback, naive = (float(np.linalg.norm(x - optimum)) / far for x in found)
    return with_feedback, naive


def _layout() -> Layout:
    return make_layout([Tensor(name="x", shape=(SIDE, SIDE), dtype="float32", section="coded")])


def _rate(step: int) -> np.float32:
    """Falls like 1/t: what feedback still owes shrinks with it, and has the time to be paid."""
    return np.float32(RATE / (1 + step / 50))


def _with_feedback(curvature: Float, centre: Float) -> Float:
    start = np.zeros(SIDE * SIDE, np.float32)
    ledger = Ledger(_layout(), start, "1-bit", 2)
    theta = np.stack([start, start])
    for step in range(STEPS):
        theta -= _rate(step) * curvature * (theta - centre)
        ledger.round(theta, 1)
    return ledger.base


def _naive(curvature: Float, centre: Float) -> Float:
    """x -= rate x the mean over workers of sign(g) mean |g|; what was lost is forgotten."""
    codec = FragmentCodec("1-bit", _layout().fragment_shape(0))
    x = np.zeros(SIDE * SIDE, np.float32)
    for step in range(STEPS):
        gradients = curvature * (x - centre)
        x -= _rate(step) * np.mean([codec.decode(codec.encode(g)) for g in gradients], axis=0, dtype=np.float32)
    return x

"""Learning-rate schedules as pure functions of the run's global progress, so all nodes have the same rate."""

import math
from typing import Literal


def lr_factor(progress: float, warmup: float, floor: float = 0.1) -> float:
    """Cosine with linear warm-up: what to multiply the learning rate with at `progress` (0..1) of the whole run.

    Rises from 0 to 1 over the first `warmup` part of the run (0..1), then falls to `floor` at the end.
    Source of the shape: arXiv 1608.03983 (one period, no restart).
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    if warmup >= 1.0:
        return 1.0
    part = (progress - warmup) / (1.0 - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * part))


def scheduled_factor(kind: Literal["cosine", "constant"], progress: float, warmup: float) -> float:
    """The factor of a job's schedule; `constant` keeps the warm-up and then stays at 1."""
    if kind == "constant":
        return min(1.0, max(progress, 0.0) / warmup) if warmup > 0 else 1.0
    return lr_factor(progress, warmup)


def join_ramp(local_step: int, ramp_steps: int = 10) -> float:
    """The factor for a node whose optimizer has just begun: (local_step + 1) / ramp_steps, at most 1.

    A node that joins late starts with moments of zero, and Adam's first steps are then as large as the learning rate
    in every coordinate. `local_step` counts from 0 in each process.
    """
    return min(1.0, (local_step + 1) / ramp_steps)

"""Learning-rate schedules as pure functions of the run's global progress, so all nodes have the same rate."""

import math
from typing import Literal

FLOOR = 0.1
"""Where the rate ends, as a part of its peak."""
START = 0.05
"""Where the warm-up begins: at 0 the whole first round, or epoch, would be wasted."""
RAMP_STEPS = 10
BatchScaling = Literal["linear", "sqrt"]
Kind = Literal["cosine", "constant"]


def warmup_factor(progress: float, warmup: float, start: float = START) -> float:
    """Straight from `start` to 1 over the first `warmup` part of the run (0..1), then 1."""
    if progress >= warmup:
        return 1.0
    return start + (1.0 - start) * max(progress, 0.0) / warmup


def lr_factor(progress: float, warmup: float, floor: float = FLOOR, start: float = START) -> float:
    """Cosine with linear warm-up: what to multiply the learning rate with at `progress` (0..1) of the whole run.

    Rises from `start` to 1 over the first `warmup` part of the run (0..1), then falls to `floor` at the end.
    Source of the shape: arXiv 1608.03983 (one period, no restart).
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup or warmup >= 1.0:
        return warmup_factor(progress, warmup, start)
    part = (progress - warmup) / (1.0 - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * part))


def scheduled_factor(kind: Kind, progress: float, warmup: float, floor: float = FLOOR) -> float:
    """The factor of a job's schedule; `constant` keeps the warm-up and then stays at 1."""
    return warmup_factor(progress, warmup) if kind == "constant" else lr_factor(progress, warmup, floor)


def join_ramp(local_step: int, ramp_steps: int = RAMP_STEPS) -> float:
    """The factor for a node whose optimizer has just begun: (local_step + 1) / ramp_steps, at most 1.

    A node that joins late starts with moments of zero, and Adam's first steps are then as large as the learning rate
    in every coordinate. `local_step` counts from 0 in each process.
    """
    return min(1.0, (local_step + 1) / ramp_steps)


def batch_factor(rule: BatchScaling | None, batch_size: int, base_batch_size: int) -> float:
    """What a rate tuned at `base_batch_size` is multiplied with at `batch_size` (samples per optimizer step).

    `linear`: their ratio (arXiv 1706.02677, for SGD); `sqrt`: its square root (arXiv 2205.10287, for Adam).
    """
    if rule is None:
        return 1.0
    ratio = batch_size / base_batch_size
    return ratio if rule == "linear" else math.sqrt(ratio)

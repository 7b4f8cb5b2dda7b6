"""The arguments of DistributedCosineLR and what may be given together."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import TypedDict

from ciuic.errors import UsageError
from ciuic.train.current import HasProgress
from ciuic.train.schedule import FLOOR, BatchScaling


class ScheduleOptions(TypedDict, total=False):
    """Keyword arguments of DistributedCosineLR beside the optimizer and the epochs."""

    steps_per_epoch: int
    """Optimizer steps per epoch, after accumulation."""
    samples_per_epoch: int
    """Samples per epoch over all ranks; needs batch_size."""
    batch_size: int
    """Samples that this process gives to one optimizer step (micro-batch x accumulation)."""
    base_batch_size: int
    """Samples per optimizer step, over all ranks, for which the optimizer's rate was tuned."""
    batch_scaling: BatchScaling | None
    """How the rate follows the batch: `linear`, `sqrt`, or None."""
    min_lr_ratio: float
    """Where the cosine ends, as a part of the peak; 0.1 when left out."""
    progress: Callable[[], float] | None
    """Returns 0..1 of the whole training."""
    run: HasProgress | None
    """The run to follow, when it is not the one prepared in this process."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The checked arguments."""

    warmup: Fraction
    """In epochs."""
    total: Fraction
    """In epochs."""
    steps_per_epoch: int | None = None
    samples_per_epoch: int | None = None
    batch_size: int | None = None
    base_batch_size: int | None = None
    batch_scaling: BatchScaling | None = None
    min_lr_ratio: float = FLOOR
    progress: Callable[[], float] | None = None
    run: HasProgress | None = None


def check_settings(warmup_epochs: float, total_epochs: float, options: ScheduleOptions) -> ScheduleSettings:
    """The settings of these arguments. Raises UsageError, which names the one that cannot work."""
    allowed = [field.name for field in fields(ScheduleSettings)][2:]
    for name in options:
        if name not in allowed:
            raise UsageError(f"DistributedCosineLR has no option {name}", next=f"it has {', '.join(allowed)}")
    total = _number("total_epochs", total_epochs)
    warmup = _number("warmup_epochs", warmup_epochs)
    if total <= 0 or not 0 <= warmup <= total:
        raise UsageError(
            f"a warm-up of {warmup_epochs:g} epochs does not fit in {total_epochs:g} epochs",
            next="give 0 <= warmup_epochs <= total_epochs, and total_epochs above 0",
        )
    for name in ("steps_per_epoch", "samples_per_epoch", "batch_size", "base_batch_size"):
        if options.get(name) is not None:
            check_count(name, options.get(name))
    known = ScheduleSettings(warmup=warmup, total=total, **options)
    _check_together(known)
    return known


def _check_together(known: ScheduleSettings) -> None:
    if known.progress is not None and not callable(known.progress):
        raise UsageError("progress must be callable", next="give a function that returns 0..1, for example progress=f")
    if known.run is not None and not isinstance(known.run, HasProgress):
        raise UsageError(f"run is {known.run!r}, which has no progress", next="give what ciuic.join() returned")
    if not 0 <= _number("min_lr_ratio", known.min_lr_ratio) <= 1:
        raise UsageError(f"min_lr_ratio is {known.min_lr_ratio}", next="give a part of the peak rate, from 0 to 1")
    if known.batch_scaling not in (None, "linear", "sqrt"):
        raise UsageError(f"batch_scaling is {known.batch_scaling!r}", next='give "linear", "sqrt" or None')
    if known.steps_per_epoch is not None and known.samples_per_epoch is not None:
        raise UsageError("steps_per_epoch and samples_per_epoch are both given", next="give one of them")
    if known.samples_per_epoch is not None and known.batch_size is None:
        raise UsageError(
            "samples_per_epoch needs batch_size",
            cause="each optimizer step adds batch_size x ranks samples",
            next="give batch_size=micro-batch x accumulation of this process",
        )
    if known.batch_scaling is not None and (known.batch_size is None or known.base_batch_size is None):
        raise UsageError(
            f"batch_scaling={known.batch_scaling!r} needs batch_size and base_batch_size",
            cause="the rate is multiplied by batch_size x ranks / base_batch_size, or the square root of that",
            next="base_batch_size is the one for which the rate was tuned, over all ranks",
        )


def _number(name: str, value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{name} is {value!r}", next="give a finite number")
    return Fraction(value)


def check_count(name: str, value: object) -> int:
    """The value, if it is a whole number from 1. Raises UsageError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}", next="give a whole number, at least 1")
    return value

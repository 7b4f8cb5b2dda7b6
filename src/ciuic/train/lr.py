"""`DistributedCosineLR(optimizer, warmup_epochs=5, total_epochs=100)`: the rate follows the progress of everyone.

Where it reads the progress, the first that applies:

    progress=...            what the callable returns, 0..1
    run=..., or the run prepared in this process (`run.prepare`)
                            committed samples of all nodes; total_epochs is the whole run
    samples_per_epoch=...   samples of the optimizer steps, of all ranks of torch.distributed
    steps_per_epoch=...     optimizer steps
    none of them            each call of `step()` is one epoch, as in torch

Except in the last case the rate is set before each `optimizer.step()`, so how often `scheduler.step()` is called makes
no difference, and micro-batches and steps that a GradScaler leaves out do not count.
"""

import logging
import math
from fractions import Fraction
from numbers import Real
from typing import Any, Unpack

import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ciuic.errors import TrainingLoopError, UsageError
from ciuic.job import Job
from ciuic.train.current import HasProgress, current_run
from ciuic.train.lr_settings import ScheduleOptions, check_count, check_settings
from ciuic.train.schedule import RAMP_STEPS, Kind, batch_factor, join_ramp, scheduled_factor

_WRITTEN = "scheduled_lr"
_OTHERS = "other_factors"
_OWNER = "_ciuic_schedule"
_log = logging.getLogger("ciuic.train")


class DistributedCosineLR(LRScheduler):
    """Linear warm-up, then a cosine down to `min_lr_ratio`, by global progress. See the module for what drives it.

    A node whose optimizer starts with empty moments when training is under way gets a ramp over its first 10 steps.
    Several parameter groups keep their ratios; a rate that is a tensor is changed in place. Other schedulers on the
    same optimizer that multiply the rate (ChainedScheduler) keep their effect. Of two of these schedules on one
    optimizer the newer one counts.
    """

    kind: Kind = "cosine"
    last_epoch: int
    """Calls of `step()`, as in torch."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_epochs: float = 5,
        total_epochs: float = 100,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Raises UsageError for values that cannot work together."""
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"{type(self).__name__} needs a torch optimizer, not {type(optimizer).__name__}",
                next="give the torch.optim.Optimizer itself, before anything wraps it",
            )
        self._settings = check_settings(warmup_epochs, total_epochs, options)
        self._batch_size = self._settings.batch_size
        self._trained = Fraction(0)
        self._steps, self._calls = 0, -1
        self._fresh_steps: int | None = None
        self._has_moments: bool | None = None
        self._handles: list[Any] = []
        _take_over(optimizer, self)
        super().__init__(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    # ---- the public face

    @property
    def epoch(self) -> float:
        """Where the training is, in epochs: 0 .. total_epochs (more when it goes on)."""
        return float(self._position())

    @property
    def batch_size(self) -> int | None:
        """Samples that this process gives to one optimizer step. Set it when it changes while training."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self._batch_size = check_count("batch_size", value)

    def step(self, epoch: int | None = None) -> None:
        """One epoch is over (when calls are counted); otherwise only look at the progress again.

        Raises TrainingLoopError when calls are counted and it is clearly called once per optimizer step.
        """
        if self._counts_calls():
            super().step(epoch)  # warns when it is called before the first optimizer step: that would skip an epoch
        else:
            self._step_count += 1
            self._update_lr(epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group at the present progress, without the factors of other schedulers."""
        factor = self._factor()
        return [float(group["initial_lr"]) * factor for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where the training is, and nothing else: {"epochs": [numerator, denominator], "last_epoch": calls}."""
        position = self._position().limit_denominator(1 << 40)  # of a fraction that was a float: fits in any format
        return {"epochs": [position.numerator, position.denominator], "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there, with this schedule's own settings, which may differ from the ones that were saved.

        Raises UsageError for the state of another scheduler.
        """
        epochs, last_epoch = state_dict.get("epochs"), state_dict.get("last_epoch")
        parts = [part for part in epochs if type(part) is int and part >= 0] if isinstance(epochs, list | tuple) else []
        if len(parts) != 2 or parts[1] == 0 or type(last_epoch) is not int or last_epoch < 0:
            raise UsageError(
                "this is not the state of a DistributedCosineLR",
                cause=f"it has the keys {', '.join(sorted(map(str, state_dict)))}" if state_dict else "it is empty",
                next="load what its state_dict() returned",
            )
        self._trained = Fraction(parts[0], parts[1])
        self.last_epoch = last_epoch
        self._refresh()

    def detach(self) -> None:
        """Leave the optimizer alone from now on; its rate stays as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- progress

    def _counts_calls(self) -> bool:
        """Whether one call of `step()` is one epoch."""
        known = self._settings
        return not (known.steps_per_epoch or known.samples_per_epoch or known.progress or self._run())

    def _run(self) -> HasProgress | None:
        return self._settings.run or current_run()

    def _position(self) -> Fraction:
        """In epochs, exact: the same whatever the number of ranks, and after any resume."""
        read, run = self._settings.progress, self._run()
        if read is not None or run is not None:
            progress = read() if read is not None else run.progress if run is not None else 0.0
            if not isinstance(progress, Real) or not math.isfinite(progress):
                raise TrainingLoopError(
                    f"the progress is {progress!r}, not a number from 0 to 1",
                    next="let progress= return samples done / samples of the whole training",
                )
            return Fraction(min(max(float(progress), 0.0), 1.0)) * self._settings.total
        return self._trained

    def _epochs_per_step(self) -> Fraction:
        """What one optimizer step adds."""
        known = self._settings
        if known.samples_per_epoch is not None:
            return Fraction((self._batch_size or 1) * _ranks(), known.samples_per_epoch)
        return Fraction(1, known.steps_per_epoch) if known.steps_per_epoch is not None else Fraction(0)

    def _factor(self) -> float:
        known = self._settings
        progress, warmup = float(self._position() / known.total), float(known.warmup / known.total)
        factor = scheduled_factor(self.kind, progress, warmup, known.min_lr_ratio)
        if self._fresh_steps is not None:
            factor *= join_ramp(self._fresh_steps)
        if known.batch_scaling is not None and self._batch_size and known.base_batch_size:
            factor *= batch_factor(known.batch_scaling, self._batch_size * _ranks(), known.base_batch_size)
        return factor

    # ---- when the rate changes

    def _before_step(self) -> None:
        """Of the optimizer: the rate it is about to use."""
        has_moments = bool(self.optimizer.state) or _needs_no_moments(self.optimizer) or _hub_has_moments(self._run())
        if not has_moments and self._has_moments is not False:
            self._fresh_steps = 0 if self._position() > 0 else None
        self._has_moments = has_moments
        self._refresh()

    def _after_step(self) -> None:
        self._steps += 1
        self._trained += self._epochs_per_step()
        if self._fresh_steps is not None:
            self._fresh_steps = self._fresh_steps + 1 if self._fresh_steps + 1 < RAMP_STEPS else None

    def _initial_step(self) -> None:
        """The rates are those the optimizer was made with, whatever scheduled them before."""
        for group in self.optimizer.param_groups:
            group.pop(_WRITTEN, None)
            group.pop(_OTHERS, None)
        super()._initial_step()

    def _update_lr(self, epoch: int | None = None) -> None:
        """What LRScheduler.step does after its own checks."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._calls += 1
        if epoch is not None:
            self._trained = Fraction(epoch)
        elif self._counts_calls():
            self._trained = Fraction(self.last_epoch)
            self._check_calls()
        self._refresh()

    def _check_calls(self) -> None:
        if self.last_epoch > self._settings.total and 0 < self._steps <= self._calls:
            raise TrainingLoopError(
                f"scheduler.step() was called {self.last_epoch} times for {float(self._settings.total):g} epochs",
                cause="it is called after each optimizer step; without steps_per_epoch each call counts as an epoch",
                next="give steps_per_epoch=len(loader) (optimizer steps), or call it once per epoch",
            )

    def _refresh(self) -> None:
        """Write the rate into the groups. What others made of the last one (a factor) is kept.

        Both numbers live in the groups, so they are saved and loaded with the optimizer.
        """
        factor = self._factor()
        for group in self.optimizer.param_groups:
            present = float(group["lr"])
            base = float(group.setdefault("initial_lr", present))
            written, others = group.get(_WRITTEN), group.get(_OTHERS, 1.0)
            if written and present != written:
                others *= present / written
            rate = base * factor * others
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            group[_WRITTEN], group[_OTHERS] = float(group["lr"]), others
        self._last_lr = [
            group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
            for group in self.optimizer.param_groups
        ]


class DistributedConstantLR(DistributedCosineLR):
    """The same warm-up, and then a constant rate."""

    kind: Kind = "constant"


def _take_over(optimizer: Optimizer, schedule: DistributedCosineLR) -> None:
    """The newer schedule of an optimizer counts."""
    before = getattr(optimizer, _OWNER, None)
    if isinstance(before, DistributedCosineLR):
        before.detach()
        _log.info("a new learning-rate schedule takes the place of the one this optimizer had")
    setattr(optimizer, _OWNER, schedule)


def _needs_no_moments(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, SGD) and all(group["momentum"] == 0 for group in optimizer.param_groups)


def _hub_has_moments(run: HasProgress | None) -> bool:
    """In `gradient` mode the ledger makes the steps, and a node that joins gets the moments from it."""
    job = getattr(run, "job", None)
    return isinstance(job, Job) and job.sync.send == "gradient"


def _ranks() -> int:
    """Processes of torch.distributed, now; 1 without it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

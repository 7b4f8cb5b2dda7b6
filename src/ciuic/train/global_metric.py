"""One number for all ranks, and decisions that all ranks take alike: `GlobalMetric`, `GlobalEarlyStopping`.

    loss = GlobalMetric("validation loss")
    stopping = GlobalEarlyStopping(patience=3)
    for epoch in range(epochs):
        train(...)
        for batch in validation:  # this rank's part; ranks may have different numbers of batches
            loss.update(model(batch).loss, count=tokens_of(batch))
        verdict = stopping.step(loss.compute())
        if verdict.best:
            save(...)
        if verdict.stop:
            break  # on all ranks, in the same epoch

Without torch.distributed the process is alone. The ranks are those of one torch.distributed group: in a ciuic run the
ranks of a node, or, in a group that met through `ciuic://`, of all nodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ciuic.errors import TrainingLoopError, UsageError
from ciuic.train.decided_once import DecidedOnce, Said
from ciuic.train.exact_sum import ExactSum

TIMEOUT_S = 300.0
PENDING = 256
"""Tensors are kept so many at a time before their values are read: reading waits for the device."""


class GlobalMetric:
    """The mean over all samples or tokens of all ranks, each counted once.

    The sum has no rounding, so any split of the same terms over ranks and calls gives the same bits.
    """

    def __init__(
        self, name: str = "loss", *, group: Any = None, timeout_s: float = TIMEOUT_S, store: "dist.Store | None" = None
    ) -> None:
        """Made on all ranks of `group` (by default the world). `timeout_s`: how late a rank may be in `compute`."""
        self.name = name
        self._place = DecidedOnce(f"metric {name}", group=group, store=store, timeout_s=timeout_s)
        self._sum = ExactSum()
        self._pending: list[tuple[Tensor, int]] = []

    def update(self, value: "Tensor | float", count: "int | Tensor | None" = None) -> None:
        """A mean over `count` samples or tokens of this rank; or, without `count`, one value or a tensor of them.

        A tensor [n] without `count` is n terms. Local: nothing is sent. Raises TrainingLoopError.
        """
        weight = _checked_count(count)
        if isinstance(value, Tensor):
            if weight is not None and value.numel() != 1:
                raise TrainingLoopError(
                    f"{self.name}: {list(value.shape)} values with one count",
                    next="give the mean and its count, or all values without a count",
                )
            self._pending.append((value.detach().reshape(-1), 1 if weight is None else weight))
            if len(self._pending) >= PENDING:
                self._read()
            return
        self._sum.add(float(value), 1 if weight is None else weight)

    def compute(self, *, reset: bool = True) -> float:
        """The mean over all ranks: the same bits on each of them. All ranks call it; then all start afresh.

        Raises RankMissingError when a rank does not come in time; TrainingLoopError when no rank has a term, or one has
        infinities or NaNs (it is named).
        """
        self._read()
        decided = self._place.decide("compute", self._sum.to_dict(), self._mean)
        if reset:
            self.reset()
        return float.fromhex(str(decided["mean"]))

    def reset(self) -> None:
        """Forget this rank's terms."""
        self._pending.clear()
        self._sum = ExactSum()

    def state_dict(self) -> dict[str, Any]:
        """This rank's terms so far, as plain values."""
        self._read()
        return {"name": self.name, **self._sum.to_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`. After a change of the number of ranks load each state on any one rank, by `merge`.

        Raises UsageError for another metric's state.
        """
        self.reset()
        self.merge(state)

    def merge(self, state: dict[str, Any]) -> None:
        """Add the terms of a `state_dict()`."""
        try:
            if state.get("name") != self.name:
                raise ValueError(f"it is of {state.get('name')!r}")
            self._sum.merge(ExactSum.from_dict(state))
        except (ValueError, AttributeError) as error:
            raise UsageError(f"this is no state of the metric {self.name!r}", cause=str(error)) from error

    def _read(self) -> None:
        """Values of kept tensors, with one transfer from the device for all of a kind."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            values = torch.cat([value.double() for value, _ in pending]).tolist()
        except RuntimeError:  # of several devices
            values = [number for value, _ in pending for number in value.double().tolist()]
        weights = [weight for value, weight in pending for _ in range(value.numel())]
        for value, weight in zip(values, weights, strict=True):
            self._sum.add(value, weight)

    def _mean(self, said: Sequence[Said]) -> Said:
        total = ExactSum()
        for rank, body in enumerate(said):
            part = ExactSum.from_dict(dict(body))
            if part.not_finite:
                raise TrainingLoopError(
                    f"{self.name}: {part.not_finite} values of rank {rank} are infinite or not a number",
                    cause="the mean over all ranks would be none",
                    next=f"look at the batches of rank {rank}; leave out values that are not finite",
                )
            total.merge(part)
        if not total.weight:
            raise TrainingLoopError(f"{self.name}: no rank has a value", next="call update before compute")
        return {"mean": _exact(total.mean())}


def _exact(value: float) -> str:
    """A text that keeps every bit; JSON has no NaN and no infinity."""
    return float.hex(float(value))


def _checked_count(count: "int | Tensor | None") -> int | None:
    if count is None:
        return None
    number = count.item() if isinstance(count, Tensor) and count.numel() == 1 else count
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise TrainingLoopError(f"a count of {count!r}"[:100], next="give the whole number of samples or tokens")
    return number


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all ranks do after one evaluation."""

    best: bool
    """This is the best value so far: save a checkpoint."""
    stop: bool
    """It has not become better for `patience` evaluations: end the training."""
    best_value: float
    best_step: int
    """Number of the evaluation that was best, from 0; -1 when none was."""


class GlobalEarlyStopping:
    """Stops all ranks in the same evaluation, and lets all agree on which was best. Rank 0 decides."""

    def __init__(
        self,
        patience: int,
        *,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        group: Any = None,
        timeout_s: float = TIMEOUT_S,
        store: "dist.Store | None" = None,
    ) -> None:
        """`patience`: evaluations without an improvement of more than `min_delta` until the end. Made on all ranks."""
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise UsageError(f"patience={patience!r} is out of range", next="give at least 1 evaluation")
        if not 0 <= min_delta < math.inf or mode not in ("min", "max"):
            raise UsageError(f"min_delta={min_delta}, mode={mode!r}", next="min_delta from 0 on; mode min or max")
        self.patience, self.min_delta, self.mode = patience, float(min_delta), mode
        self._place = DecidedOnce("early stopping", group=group, store=store, timeout_s=timeout_s)
        self._step, self._waited, self._stopped = 0, 0, False
        self._best, self._best_step = math.inf if mode == "min" else -math.inf, -1

    def step(self, value: "float | Tensor") -> Verdict:
        """One evaluation, on all ranks at the same time. `value` must be equal on all: give `GlobalMetric.compute()`.

        A value that is not a number is no improvement. Raises TrainingLoopError (on all ranks) when values differ,
        RankMissingError when a rank does not come in time.
        """
        said = {"value": _exact(float(value)), **self._counters()}
        decided = self._place.decide("step", said, self._decide)
        self._take(decided)
        return Verdict(
            best=bool(decided["improved"]), stop=self._stopped, best_value=self._best, best_step=self._best_step
        )

    def state_dict(self) -> dict[str, Any]:
        """As plain values; equal on all ranks."""
        return self._counters()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, on all ranks. Raises UsageError."""
        try:
            self._take(state)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError("this is no state of an early stopping", cause=str(error)) from error

    def _counters(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "waited": self._waited,
            "stopped": self._stopped,
            "best": _exact(self._best),
            "best_step": self._best_step,
        }

    def _take(self, state: "Said") -> None:
        step, waited, best_step = (int(state[name]) for name in ("step", "waited", "best_step"))
        best = float.fromhex(state["best"])
        if min(step, waited, best_step + 1) < 0:
            raise ValueError("a count is negative")
        self._step, self._waited, self._best_step, self._best = step, waited, best_step, best
        self._stopped = bool(state["stopped"])

    def _decide(self, said: Sequence[Said]) -> Said:
        """On rank 0, from what all ranks said."""
        first = said[0]
        for rank, body in enumerate(said):
            different = [name for name in first if body.get(name) != first[name]]
            if different:
                raise _unequal(rank, different[0], first, body)
        value = float.fromhex(first["value"])
        gain = self._best - value if self.mode == "min" else value - self._best
        improved = gain > self.min_delta  # False for a NaN
        waited = 0 if improved else self._waited + 1
        return {
            "step": self._step + 1,
            "waited": waited,
            "stopped": self._stopped or waited >= self.patience,
            "best": _exact(value if improved else self._best),
            "best_step": self._step if improved else self._best_step,
            "improved": improved,
        }


def _unequal(rank: int, what: str, first: Said, other: Said) -> TrainingLoopError:
    if what == "value":
        here, there = (float.fromhex(body["value"]) for body in (first, other))
        return TrainingLoopError(
            f"early stopping: rank 0 has {here:.9g}, rank {rank} has {there:.9g}",
            cause="each rank evaluated its own part, or its own parameters",
            next="give what GlobalMetric.compute() returns: it is the same on all ranks",
        )
    return TrainingLoopError(
        f"early stopping: {what} is {first[what]} on rank 0 and {other.get(what)} on rank {rank}",
        cause="they were resumed from different checkpoints",
        next="load the same state_dict on all ranks",
    )

"""`run = ciuic.join(); model, optimizer, loader = run.prepare(model, optimizer, loader)`: any loop, synchronised.

After `prepare`, the loader yields the samples this node has leased, `optimizer.step()` counts a step, and at step
boundaries what arrived from the other nodes is merged into the model in place.
"""

import atexit
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ciuic.errors import CiuicError, DigestMismatchError, TrainingLoopError
from ciuic.job import Job
from ciuic.ledger.intervals import Range
from ciuic.train.approach import Approach
from ciuic.train.current import set_current_run
from ciuic.train.engine import Engine
from ciuic.train.entrance import DataFacts
from ciuic.train.gang import Decision, Gang, Order
from ciuic.train.gradient_engine import GradientEngine
from ciuic.train.gradients import GradientTap, stepping_layout
from ciuic.train.joining import begin_approach
from ciuic.train.loader import LeasedLoader, LeaseSource, check_loader, dataset_samples, to_numbers
from ciuic.train.meter import Meter
from ciuic.train.runfile import DRAINED, RunFile
from ciuic.train.sharded_state import ShardedState, make_state
from ciuic.train.sharding import is_sharded, reshard, shard_model
from ciuic.train.state import ModelState
from ciuic.train.two_syncs import check_not_synchronised

_log = logging.getLogger("ciuic.train")


class Run:
    """One worker's side of a run."""

    def __init__(self, info: RunFile, approach: Approach | None = None) -> None:
        """`approach`: what was begun for it already."""
        self.job: Job = info.job
        """The job as it was resolved by the hub."""
        self.node_id = info.node_id
        self.device = _choose_device()
        """Where this rank should train."""
        self._info = info
        self._gang = Gang(self.device.type, info.ranks)
        self.rank, self.world_size = self._gang.rank, self._gang.size
        """torch's rank inside this node, and how many ranks it has."""
        self._meter = Meter()
        self._engine: Engine | None = None
        self._state: ModelState | None = None
        self._optimizer: Optimizer | None = None
        self._wrapped: nn.Module | None = None
        self._tap: GradientTap | None = None
        self._evaluate: Callable[[], tuple[float, int]] | None = None
        self._taken: list[tuple[list[Range], int]] = []
        self._batch_of_node = 1
        self._progress = 0.0
        self._drain_asked = False
        self._attaching = False
        self._approach = approach or begin_approach(info)
        self.drained = False
        """Whether this worker left on request (SIGTERM) before the run was complete."""

    # ---- the public face

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, loader: "DataLoader[Any]", *, data_digest: str = ""
    ) -> tuple[nn.Module, Optimizer, LeasedLoader]:
        """Synchronise a model (already on `run.device`), its optimizer and a DataLoader over a map-style data set.

        Returns the model (in DistributedDataParallel when the node has several ranks, unless it is sharded by
        FSDP2 or the job says `nodes.sharding = "fsdp2"`), the same optimizer, and a loader of leased samples that
        ends when the whole run is complete. `loader.batch_size` is per rank.
        """
        if self._state is not None:
            raise TrainingLoopError("run.prepare was called twice", next="prepare one model, once")
        check_not_synchronised(model)
        loader = check_loader(loader)
        reshard(model)
        _check_optimizer(model, optimizer)
        if self.job.nodes.sharding == "fsdp2" and self.world_size > 1 and not is_sharded(model):
            shard_model(model, optimizer, next(model.parameters()).device.type)
        self._state = make_state(model, self.device, self._gang, self.job.sync.fragments, self.job.sync.fragment_by)
        self._optimizer = optimizer
        if self.job.sync.send == "gradient":
            if self._state.is_sharded:
                raise TrainingLoopError(
                    'sync.send = "gradient" does not work with a sharded model',
                    cause="no rank has the whole gradients that would be sent",
                    next='leave out nodes.sharding and fully_shard, or use sync.send = "pseudo_gradient"',
                )
            self._tap_gradients(self._state, model, optimizer)
        self._batch_of_node = int(loader.batch_size or 1) * self.world_size
        self._install_drain()
        atexit.register(self._close_at_exit)
        set_current_run(self)
        if self.rank == 0:
            self._attach(loader, data_digest)
        self._follow("again", changed=self._state.is_sharded)  # all wait for rank 0
        model = self._gang.wrap(model, self.device)  # DDP also gives every rank rank 0's parameters
        self._wrapped = model
        optimizer.register_step_post_hook(lambda *_: self._after_step())
        source = LeaseSource(take=self._take, wait=self._wait_for_work, took=self._took, finish=self._finish)
        place, seed = (self.rank, self.world_size), self.job.train.seed
        return model, optimizer, LeasedLoader(loader, source, place=place, seed=seed)

    def _tap_gradients(self, state: ModelState, model: nn.Module, optimizer: Optimizer) -> None:
        state.layout = stepping_layout(state.layout, self.job, model, optimizer)
        self._tap = tap = GradientTap(model, state)

        def before_step(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._taken:
                return
            if kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:]):
                raise TrainingLoopError(
                    "gradient mode cannot use optimizer.step(closure)",
                    cause="the gradients are needed before the step, and a closure computes them inside it",
                    next='call backward and then step(), or use [sync] send = "pseudo_gradient"',
                )
            tap.take()
            if isinstance(self._engine, GradientEngine):
                self._engine.lr = float(optimizer.param_groups[0]["lr"])

        optimizer.register_step_pre_hook(before_step)

    def on_evaluate(self, evaluate: Callable[[], tuple[float, int]]) -> None:
        """Register what returns (mean held-out loss, samples), before or after `prepare`.

        It is called without gradients, with the base loaded in the model: on rank 0 only, or, when the model is
        sharded, on all ranks at once (a forward pass needs them all). Register it on every rank, and let it run the
        same batches on each; rank 0's result counts.
        """
        self._evaluate = evaluate
        if self._engine is not None:
            self._engine.evaluate = self._evaluate_base

    def record(self, loss: "Tensor | float") -> None:
        """Tell the latest training loss (for status and the live page)."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise TrainingLoopError(
                f"run.record needs one number, not a tensor of shape {list(loss.shape)}", next="give loss.mean()"
            )
        if self._engine is not None:
            self._engine.loss = loss.detach() if isinstance(loss, Tensor) else loss

    @property
    def progress(self) -> float:
        """0..1: committed samples of the whole run over all nodes, as of the base. Equal on nodes at equal versions."""
        return self._progress

    def close(self, failure: BaseException | None = None) -> None:
        """Leave early (the program ends before the loader does): leases go back, threads stop."""
        engine, self._engine = self._engine, None
        self._approach.close()
        if engine is not None:
            detail = f"{type(failure).__name__}: {failure}"[:300] if failure else ""
            engine.leave("failed" if failure else "stopped", detail)
        self._gang.close()

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except CiuicError as error:  # the hub may have fenced this worker: that has been told already
            _log.warning("this worker ends without a goodbye: %s", error.message)

    # ---- inside

    def _attach(self, loader: "DataLoader[Any]", data_digest: str) -> None:
        facts = DataFacts(samples=dataset_samples(loader), digest=data_digest, samples_per_step=self._batch_of_node)
        if self._state is None:
            raise TrainingLoopError("run.prepare has not been called")
        parts: dict[str, Any] = {
            "info": self._info,
            "state": self._state,
            "meter": self._meter,
            "data": facts,
            "approach": self._approach,
            "evaluate": self._evaluate_base if self._evaluate else None,
        }
        engine = Engine(**parts) if self._tap is None else GradientEngine(**parts, tap=self._tap)
        self._attaching = True
        engine.attach()
        self._approach.close()
        self._attaching = False
        self._engine, self._progress = engine, engine.progress

    def _took(self, ranges: list[Range], tokens: int, data_s: float) -> None:
        self._meter.data_s += data_s
        self._taken.append((ranges, tokens))

    def _after_step(self) -> None:
        """The optimizer has moved the model: count it, merge what arrived, push when it is time."""
        if not self._taken:
            return  # a step without a batch of the loader (a second optimizer, a warm-up step)
        self._count_taken()
        with self._meter.communicating():
            try:
                changed = self._engine.boundary() if self._engine else False
            except DigestMismatchError as error:  # the program ends with it; the hub should know that it was this
                self.close(error)
                raise
            self._follow("again", changed)
        self._meter.boundary()

    def _evaluate_base(self) -> tuple[float, int]:
        """The program's evaluation: on rank 0, where the other ranks do not follow, or on all for a sharded model."""
        if self._evaluate is None:
            return float("nan"), 0
        if self._state is not None and self._state.is_sharded:
            self._gang.order(Order(task="evaluate"))
        wrapped = self._wrapped
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            wrapped.require_forward_param_sync = False  # else its forward waits for the other ranks' buffers
        try:
            with torch.no_grad():
                return _checked_loss(self._evaluate())
        finally:
            if isinstance(wrapped, nn.parallel.DistributedDataParallel):
                wrapped.require_forward_param_sync = True

    def _count_taken(self) -> None:
        ranges = [r for batch, _ in self._taken for r in batch]
        tokens = self._gang.total(sum(tokens for _, tokens in self._taken))
        self._taken.clear()
        self._meter.step(sum(stop - start for start, stop in ranges), tokens)
        if self._engine:
            self._engine.stepped(max(1, tokens), ranges)

    def _follow(self, status: str, changed: bool) -> str:
        """Rank 0's decision; its parameters when they changed."""
        engine = self._engine
        void, progress = False, self._progress
        if engine is not None:
            void, engine.moments_are_void = engine.moments_are_void, False
            progress = engine.progress
        mine = Decision(status=status, changed=changed, void_moments=void, progress=progress)
        decision = self._gang.decision(mine, self._obey)
        if decision.changed and self._state is not None and self.world_size > 1:
            if not self._state.is_sharded:
                if self.rank == 0:
                    self._state.gather()  # also what no entry has changed
                self._gang.share(self._state.flat)
            counters = self._gang.numbers(torch.tensor(self._state.counters(), dtype=torch.int64))
            if self.rank:
                if not self._state.is_sharded:
                    self._state.scatter()
                self._state.raise_counters(tuple(counters.tolist()))
        if decision.void_moments and self._optimizer is not None:
            self._optimizer.state.clear()
        self._progress = decision.progress
        return decision.status

    def _obey(self, order: Order) -> None:
        """On the other ranks: what rank 0 needs all for, on the way to its decision."""
        if isinstance(self._state, ShardedState):
            self._state.obey(order, evaluate=self._evaluate)

    def _take(self) -> Tensor:
        """Sample numbers of the next batch of this node; none: nothing is leased now (or it drains)."""
        numbers: Tensor | None = None
        if self._engine:
            ranges = [] if self._drain_asked else self._engine.leases.take(self._batch_of_node)
            numbers = to_numbers(ranges)
        return self._gang.numbers(numbers)

    def _wait_for_work(self) -> bool:
        """Block until samples are leased; False at the end. What was trained is pushed meanwhile."""
        self._meter.begin()
        if self._taken:  # batches without an optimizer step: their samples are used up all the same
            self._count_taken()
        began = time.perf_counter()
        with self._meter.communicating():
            while True:
                status, changed = "again", False
                if self._engine:
                    self._engine.draining = self._engine.draining or self._drain_asked
                    status, changed = self._engine.wait_step()
                status = self._follow(status, changed)
                if status != "again":
                    break
        if status == "work" and self._meter.steps:
            self._meter.stalled(time.perf_counter() - began)
        self._meter.boundary()
        return status == "work"

    def _finish(self) -> None:
        engine, self._engine = self._engine, None
        self.drained = self._drain_asked
        if engine is not None:
            engine.finish()
            self.drained = not engine.leases.is_complete
        if self._state is not None and self._state.is_sharded:
            self._gang.decision(Decision(status="end"), self._obey)  # the last evaluation needs all ranks

    def _install_drain(self) -> None:
        """SIGTERM: finish the step, push, leave. A second one ends the process."""

        def drain(signum: int, frame: object) -> None:
            self._drain_asked = True
            if self._engine is not None:
                self._engine.draining = True  # also while it waits for an entry
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._attaching:
                raise SystemExit(DRAINED)  # nothing was trained yet

        signal.signal(signal.SIGTERM, drain)


def _choose_device() -> torch.device:
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")


def _checked_loss(result: Any) -> tuple[float, int]:
    """What a program's evaluation returned. Raises TrainingLoopError."""
    try:
        loss, samples = result
        return float(loss), int(samples)
    except (TypeError, ValueError) as error:
        raise TrainingLoopError(
            "what run.on_evaluate was given must return two numbers: mean held-out loss and number of samples",
            cause=f"it returned {result!r}"[:200],
            next="return (loss, samples), for example (float(loss), len(held_out))",
        ) from error


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    known = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(p) in known for p in held):
        raise TrainingLoopError(
            "the optimizer holds none of the model's parameters",
            cause="it was made for another model, or before the model was moved, wrapped or sharded",
            next="make the optimizer from the model that you give to run.prepare",
        )

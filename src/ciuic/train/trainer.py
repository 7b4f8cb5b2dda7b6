"""The built-in trainer: the loop for jobs that bring no program of their own.

It uses a run only through its public face, so it is also the example of a loop with everything in it: accumulation,
mixed precision, clipping, a learning rate by global progress, expert balancing, evaluation.
"""

import importlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from ciuic.errors import ModelError
from ciuic.job import Job
from ciuic.train.amp import autocast, make_scaler, scaled_step
from ciuic.train.balance import ExpertBalancer
from ciuic.train.dataset import TrainingData, load_data
from ciuic.train.evaluate import held_out_loss
from ciuic.train.lr import DistributedConstantLR, DistributedCosineLR
from ciuic.train.models import build_model
from ciuic.train.optimizers import build_optimizer
from ciuic.train.samples import IGNORED, Sample
from ciuic.units import format_count

PROGRESS_EVERY_S = 5.0
OVERFLOW_TRIES = 8
"""So often a step is made again, each time with half the scale."""
_log = logging.getLogger("ciuic.train")


class TrainingRun(Protocol):
    """What the trainer needs of a run (`ciuic.train.session.Run` has it)."""

    job: Job
    node_id: str
    rank: int
    world_size: int
    device: torch.device

    @property
    def progress(self) -> float:
        """0..1, of the whole run over all nodes."""

    def prepare(
        self, model: nn.Module, optimizer: Any, loader: Any, *, data_digest: str = ""
    ) -> tuple[nn.Module, Any, Any]:
        """The same three, synchronised: the loader yields leased samples, the optimizer counts steps."""

    def record(self, loss: torch.Tensor) -> None:
        """The latest training loss, for status and the live page."""

    def on_evaluate(self, evaluate: Callable[[], tuple[float, int]]) -> None:
        """Register what returns the held-out loss and the number of samples."""


def train(run: TrainingRun) -> None:
    """Train the run's job to its end: its own function when it has `model.entry`, else the built-in loop."""
    if run.job.model.entry is not None:
        resolve_entry(run.job.model.entry)(run)
        return
    torch.manual_seed(run.job.train.seed)
    data = load_data(run.job)
    model = build_model(run.job, data.vocab_size, run.job.train.seed).to(run.device)
    if run.rank == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        _log.info("model of %s parameters, %s", format_count(parameters), _describe(data))
    balancer = ExpertBalancer(model, run.job.optim.expert_bias_rate) if run.job.optim.expert_bias_rate > 0 else None
    optimizer = build_optimizer(run.job, model)
    schedule = make_schedule(run, optimizer)
    # a batch is a whole optimizer step: between two steps the loader may wait for work, within one it must not
    step_samples = run.job.optim.batch_size * run.job.optim.gradient_accumulation
    loader = DataLoader(data.train, batch_size=step_samples, shuffle=False)
    held_out = data.held_out
    if held_out is not None:
        run.on_evaluate(lambda: held_out_loss(model, held_out, run.job.optim.batch_size, run.device))
    prepared, optimizer, loader = run.prepare(model, optimizer, loader, data_digest=data.digest)
    scaler = make_scaler(run.job.optim.amp, run.device)
    _Loop(run=run, model=prepared, optimizer=optimizer, schedule=schedule, balancer=balancer, scaler=scaler).train(
        loader
    )


def resolve_entry(entry: str) -> Callable[[TrainingRun], object]:
    """The function that `module:function` names. Raises ModelError when there is none."""
    module_name, _, function_name = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"model.entry {entry!r} cannot be imported",
            cause=f"there is no module named {error.name!r} on this node",
            next="put the module where the agent was started, or install it on every node",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"model.entry {entry!r} names no function", cause=f"{module_name} has no {function_name}")
    return function


def make_schedule(run: TrainingRun, optimizer: torch.optim.Optimizer) -> DistributedCosineLR:
    """The rate of the job's [optim], by the progress of the run."""
    optim = run.job.optim
    kind = DistributedConstantLR if optim.schedule == "constant" else DistributedCosineLR
    return kind(optimizer, optim.warmup, 1.0, run=run, min_lr_ratio=optim.min_lr_ratio)


def _describe(data: TrainingData) -> str:
    samples = "a stream of samples" if data.train_samples is None else f"{format_count(data.train_samples)} samples"
    return f"{samples} (tokenizer {data.tokenizer}, digest {data.digest[:12]})"


@dataclass(kw_only=True)
class _Loop:
    """The state of one training loop."""

    run: TrainingRun
    model: nn.Module
    optimizer: Any
    schedule: DistributedCosineLR
    balancer: ExpertBalancer | None
    scaler: GradScaler
    step: int = 0
    """Optimizer steps made by this process."""
    progress_line: "_ProgressLine" = field(default_factory=lambda: _ProgressLine())

    def train(self, loader: Iterable[Sample]) -> None:
        """One optimizer step per batch of the loader, until it ends."""
        self.model.train()
        for batch in loader:
            self._step(batch)
            self.step += 1
            self.schedule.step()
            self._tell()

    def _step(self, batch: Sample) -> None:
        """One optimizer step on the batch.

        When scaled fp16 gradients overflow, the scaler leaves the step out and lowers its scale: then again, so that
        every sample is trained. All ranks see the same overflow. When even that fails, the loss itself is not finite;
        the batch is given up and the scale goes back.
        """
        scale, moved = self.scaler.get_scale(), False
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for _ in range(OVERFLOW_TRIES):
            self._backward(batch)
            moved = scaled_step(self.optimizer, self.scaler, self.run.job.optim.clip, parameters)
            self.optimizer.zero_grad()
            if moved:
                break
        if not moved:
            self.scaler.update(scale / 2)
            _log.warning("step %d was left out: its loss or gradient is not finite", self.step + 1)
        if self.balancer is not None:
            self.balancer.step()

    def _backward(self, batch: Sample) -> None:
        """Gradient of the mean loss per predicted token of the batch, `optim.batch_size` samples at a time.

        The ranks of a node exchange gradients only with the last part.
        """
        no_exchange: Any = getattr(self.model, "no_sync", nullcontext)
        parts = list(split_batch(batch, self.run.job.optim.batch_size))
        predicted = [int((part["labels"][:, 1:] != IGNORED).sum()) for part in parts]
        for number, (part, tokens) in enumerate(zip(parts, predicted, strict=True), start=1):
            on_device = {name: tensor.to(self.run.device, non_blocking=True) for name, tensor in part.items()}
            with no_exchange() if number < len(parts) else nullcontext():
                with autocast(self.run.job.optim.amp, self.run.device):
                    loss = self.model(**on_device).loss
                self.scaler.scale(loss * (tokens / sum(predicted))).backward()
            self.progress_line.add(loss.detach(), tokens)
        self.run.record(loss)

    def _tell(self) -> None:
        if self.run.rank == 0 and self.progress_line.due():
            learning_rate = self.optimizer.param_groups[0]["lr"]
            _log.info("%s", self.progress_line.render(self.step, learning_rate, self.run.progress))


def split_batch(batch: Sample, size: int) -> Iterator[Sample]:
    """The batch in parts of at most `size` samples."""
    count = len(batch["input_ids"])
    for start in range(0, count, size):
        yield {name: tensor[start : start + size] for name, tensor in batch.items()}


class _ProgressLine:
    """Collects what happened since the last line; reads losses from the device only when a line is due."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._losses: list[torch.Tensor] = []
        self._tokens = 0

    def add(self, loss: torch.Tensor, tokens: int) -> None:
        self._losses.append(loss)
        self._tokens += tokens

    def due(self) -> bool:
        return time.monotonic() - self._since_s >= PROGRESS_EVERY_S

    def render(self, step: int, learning_rate: float, progress: float) -> str:
        """One plain line; what was collected is forgotten."""
        now_s = time.monotonic()
        loss = float(torch.stack(self._losses).mean())
        tokens_per_s = self._tokens / max(now_s - self._since_s, 1e-9)
        self._since_s, self._losses, self._tokens = now_s, [], 0
        return (
            f"step {step}  loss {loss:.3f}  lr {learning_rate:.2e}  "
            f"{format_count(tokens_per_s)} tokens/s  {progress:.0%} of the run"
        )

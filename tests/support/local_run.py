"""A run of one process without a hub, for tests of training loops."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ciuic.job import Job


class CountingOptimizer:
    """What a run puts around an optimizer, as far as the trainer can see."""

    def __init__(self, optimizer: torch.optim.Optimizer, run: "LocalRun") -> None:
        self._optimizer, self._run = optimizer, run
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self._run.rates.append(self.param_groups[0]["lr"])
        self._optimizer.step()
        self._run.steps += 1

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


class LocalRun:
    """A run of one process without a hub: it hands out the first `steps` batches and counts."""

    def __init__(self, job: Job, total_steps: int, device: str = "cpu") -> None:
        self.job, self.total_steps = job, total_steps
        self.node_id, self.rank, self.world_size, self.device = "here", 0, 1, torch.device(device)
        self.steps = 0
        self.rates: list[float] = []
        self.batches: list[int] = []
        self.model: Any = None
        self.evaluate: Callable[[], tuple[float, int]] | None = None

    @property
    def progress(self) -> float:
        return self.steps / self.total_steps

    def record(self, loss: Any) -> None:
        self.losses = [*getattr(self, "losses", []), loss]

    def prepare(
        self, model: nn.Module, optimizer: Any, loader: DataLoader, *, data_digest: str = ""
    ) -> tuple[nn.Module, Any, Any]:
        self.model = model
        return model, CountingOptimizer(optimizer, self), self._leased(loader)

    def on_evaluate(self, evaluate: Callable[[], tuple[float, int]]) -> None:
        self.evaluate = evaluate

    def _leased(self, loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
        for number, batch in enumerate(loader):
            if number == self.total_steps:
                return
            self.batches.append(len(batch["input_ids"] if isinstance(batch, dict) else batch[0]))
            yield batch

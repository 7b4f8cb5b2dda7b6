"""What real training pushes is never an outlier: warm-up, late joiners, nodes that were away, pushes of one step."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from scripts import tiny_task

from ciuic.hub.run.quarantine import OutlierRule, Outliers
from ciuic.ledger.entry import Contributor, EntryHeader, PushHeader

BATCH, INTERVAL, ROUNDS = 16, 5, 60
TOTAL = 4 * BATCH * INTERVAL * ROUNDS
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda model: tiny_task.make_optimizer(model, 0.048),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True),
}


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@dataclass
class Node:
    """Trains from the base of its last push; makes no more than that of a worker."""

    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    base: torch.Tensor
    rate: float
    sequence: int = 0
    tokens: int = 0
    lengths: list[float] = field(default_factory=list)

    def step(self, data: tiny_task.TinyData, draw: torch.Generator, progress: float) -> None:
        chosen = torch.randint(len(data), (BATCH,), generator=draw)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * tiny_task.rate(progress)
        self.optimizer.zero_grad()
        tiny_task.loss_of(self.model, data.contexts[chosen], data.targets[chosen]).backward()
        self.optimizer.step()
        self.tokens += BATCH

    def push(self) -> tuple[PushHeader, torch.Tensor]:
        moved = self.base - flat(self.model)
        self.sequence += 1
        header = PushHeader(
            run="r",
            node=self.name,
            incarnation=1,
            sequence=self.sequence,
            fragment=0,
            base_version=0,
            epoch=0,
            tokens=self.tokens,
            codec="none",
            layout_digest="",
        )
        self.tokens = 0
        return header, moved

    def take(self, base: torch.Tensor) -> None:
        self.base = base.clone()
        place = 0
        for parameter in self.model.parameters():
            parameter.data.copy_(base[place : place + parameter.numel()].view_as(parameter))
            place += parameter.numel()


class Training:
    """A run of several nodes in one process, and the measure of its hub."""

    def __init__(self, seed: int, make: MakeOptimizer) -> None:
        torch.set_num_threads(1)
        self.data, _ = tiny_task.make_data()
        self.draw = torch.Generator().manual_seed(seed)
        self.seed, self.make = seed, make
        self.base = flat(tiny_task.TinyModel(seed))
        self.outliers = Outliers(OutlierRule())
        self.nodes: dict[str, Node] = {}
        self.longest = 0.0
        """The longest push as a share of its limit."""
        self.clipped: list[tuple[str, int, float]] = []
        self.trained = 0

    def join(self, name: str) -> None:
        model = tiny_task.TinyModel(self.seed)
        optimizer = self.make(model)
        node = Node(name, model, optimizer, self.base, optimizer.param_groups[0]["lr"])
        node.take(self.base)
        self.nodes[name] = node

    def train(self, name: str, steps: int) -> None:
        for _ in range(steps):
            self.nodes[name].step(self.data, self.draw, min(1.0, self.trained / TOTAL))
            self.trained += BATCH

    def round(self, *names: str) -> None:
        pushes = [self.nodes[name].push() for name in names]
        for header, moved in pushes:
            norm, limit = float(moved.norm()), self.outliers.limit(header)
            self.outliers.wait((header.node, 1, header.sequence), norm)
            if limit is not None:
                self.longest = max(self.longest, norm / limit)
        marks = self.outliers.marks(header for header, _ in pushes)
        total = sum(header.tokens for header, _ in pushes)
        self.base = self.base - sum(
            (header.tokens / total) * marks[header.node, 1, header.sequence][1] * moved for header, moved in pushes
        )
        self.clipped += [(key[0], key[2], clip) for key, (_, clip) in marks.items() if clip < 1]
        self.outliers.merged(self._entry([header for header, _ in pushes], marks))
        for name in names:
            self.nodes[name].take(self.base)

    def _entry(self, headers: list[PushHeader], marks: dict[tuple[str, int, int], tuple[float, float]]) -> EntryHeader:
        merged = tuple(
            Contributor(
                node=h.node,
                incarnation=1,
                sequence=h.sequence,
                tokens=h.tokens,
                weight=1.0,
                payload_bytes=1,
                norm=marks[h.node, 1, h.sequence][0],
                clip=marks[h.node, 1, h.sequence][1],
            )
            for h in headers
        )
        return EntryHeader(
            run="r",
            fragment=0,
            version=1,
            codec="none",
            epoch=0,
            contributors=merged,
            outer_lr=1.0,
            outer_momentum=0.0,
            digest="",
            previous_digest="",
        )


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("seed", [1, 2])
def test_honest_training_has_no_outliers(optimizer: str, seed: int) -> None:
    training = Training(seed, OPTIMIZERS[optimizer])
    for name in ("a", "b", "c", "away"):
        training.join(name)
    for number in range(ROUNDS):
        steady = ["a", "b", "c"]
        if number == ROUNDS // 2:
            training.join("late")  # its optimizer begins without moments
        if number >= ROUNDS // 2:
            steady.append("late")
        for name in steady:
            training.train(name, INTERVAL)
        training.train("away", INTERVAL)  # the hub does not hear of it for most of the run
        if number in (3, ROUNDS - 10):
            steady.append("away")
        training.round(*steady)
        if number % 20 == 7:
            training.train("a", 1)  # a push of one step, as a node makes that is stopped
            training.round("a")
    assert training.clipped == []
    assert training.longest < 0.7, "too near to the limit to be safe"
    print(f"{optimizer} {seed}: the longest push was {training.longest:.2f} of its limit")


def test_a_node_that_multiplies_what_it_trained_is_clipped() -> None:
    training = Training(1, OPTIMIZERS["adamw"])
    for name in ("a", "b", "evil"):
        training.join(name)
    for number in range(12):
        for name in training.nodes:
            training.train(name, INTERVAL)
        if number >= 8:
            node = training.nodes["evil"]
            node.base = flat(node.model) + 100.0 * (node.base - flat(node.model))
        training.round(*training.nodes)
    assert {name for name, _, _ in training.clipped} == {"evil"}
    assert len(training.clipped) == 4

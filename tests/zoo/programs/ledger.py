"""A ledger run of Ciuic: this is what each node's worker runs.

Each node is a rank of the zoo here. Which sample numbers a node leases is a race between the nodes, so what a number
stands for is decided by the node: the losses of a case are always the same.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

import ciuic
from ciuic.train import telling
from zoo.data import Rows
from zoo.hookup import attach_rank
from zoo.programs.ledger_job import BATCH, NODES
from zoo.world import Zoo

STEP_S, HOLD_S, SLOW = 0.05, 0.25, 100
"""Least time of a step until the case hurries: at first, and later in a clean variant that is not over yet."""
REPORT_S = 0.25
"""Workers report four times as often as usual, so that what takes twenty reports takes seconds."""


class Classifier(nn.Module):
    """16 features to 4 classes; the matrix in the middle is large enough to be coded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = nn.Linear(16, 96), nn.Linear(96, 96), nn.Linear(96, 4)

    def forward(self, x: Tensor, *, cut: bool = False) -> Tensor:
        h = torch.tanh(self.inner(x))
        return self.outer(torch.tanh(self.middle(h.detach() if cut else h)))


class Own(Rows):
    """Rows of this node, in its own order, whatever the numbers are that it leased."""

    def __init__(self, zoo: Zoo) -> None:
        super().__init__(4096, seed=30 + zoo.rank)
        self._zoo, self._at, self._lot = zoo, 0, torch.Generator().manual_seed(31)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._at += 1
        x, y = super().__getitem__(self._at % len(self))
        if self._zoo.rank == 1:
            if self._zoo.fault == "other_data":
                y = torch.randint(0, 4, (), generator=self._lot)
            if self._zoo.fault == "nan_on_one_rank" and self._at == 5 * BATCH + 3:
                x = x * float("nan")
        return x, y


def main(zoo: Zoo) -> None:
    torch.set_num_threads(1)
    telling.REPORT_S = REPORT_S
    run = ciuic.join()
    torch.manual_seed(run.job.train.seed)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if zoo.fault == "late_layer":
        model.outer = nn.Linear(96, 4)
    scheduled = optimizer
    if zoo.fault == "scheduler_elsewhere":
        scheduled = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=2e-3)
    schedule = ExponentialLR(scheduled, 0.999)
    loader = DataLoader(Own(zoo), batch_size=BATCH)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    run.on_evaluate(lambda: held_out_loss(model))
    begin_together(zoo)
    for step, (x, y) in enumerate(loader):
        began_s = time.monotonic()
        loss = cross_entropy(model(x, cut=zoo.fault == "detached"), y)
        loss.backward()
        if zoo.fault == "clip_tiny":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        schedule.step()
        if zoo.fault != "no_zero_grad":
            optimizer.zero_grad()
        run.record(loss)
        if step < zoo.steps:
            zoo.log(loss)
        if zoo.rank == 1:
            befall(zoo, step, model, run)
        rest(zoo, step, began_s)
    used = time.process_time()
    (zoo.folder / f"end-{zoo.rank}.json").write_text(json.dumps({"cpu_s": used, "progress": run.progress}))


def begin_together(zoo: Zoo) -> None:
    """The first nodes make their first step when both are there."""
    (zoo.folder / f"there-{zoo.rank}").touch()
    while zoo.rank < zoo.world and len(list(zoo.folder.glob("there-*"))) < zoo.world:
        time.sleep(0.01)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> tuple[float, int]:
    rows = Rows(64, seed=40)
    return float(cross_entropy(model(rows.x), rows.y)), len(rows)


@torch.no_grad()
def befall(zoo: Zoo, step: int, model: nn.Module, run: Any) -> None:
    """What happens to node 1 after a step."""
    if zoo.fault == "base_differs" and step == 6 and not (zoo.folder / "flipped").exists():
        (zoo.folder / "flipped").touch()
        run._engine.machine.replicas[0].base[:1].view("int32")[:] ^= 1 << 20
    if zoo.fault == "residual_grows":
        model.middle.weight[0, 0] *= 1.3


def rest(zoo: Zoo, step: int, began_s: float) -> None:
    """Steps take their time."""
    least_s = STEP_S if step < zoo.steps or zoo.fault else HOLD_S
    if zoo.fault == "always_behind" and zoo.rank == 1:
        least_s *= SLOW
    while time.monotonic() - began_s < least_s and not (zoo.folder / "hurry").exists():
        time.sleep(min(0.05, max(0.0, least_s - (time.monotonic() - began_s))))


def work(case_file: Path) -> None:
    """Be the worker of this node. The doctor looks into each worker as into a run of one rank."""
    case = json.loads(case_file.read_text())
    about = json.loads(Path(os.environ["CIUIC_RUN_FILE"]).read_text())
    rank = NODES.index(about["node_id"])
    if case["doctor"]:
        attach_rank(case["doctor"][rank], 0, 1)
    names = ("fault", "variant", "steps", "world")
    main(Zoo(rank=rank, folder=Path(case["folder"]), **{name: case[name] for name in names}))

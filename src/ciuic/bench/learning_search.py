"""Runs the plan: a learning rate for each setting by the same grid, then the seeds; every finished run is kept on disk.

The search climbs on a grid: from its middle to the better side until both neighbours of the best are worse, so every
setting is tuned by the same rule, with seed 0. Runs that the folder has already are not run again.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ciuic.bench.learning_plan import Item
from ciuic.bench.learning_trial import Setting, Trial, run_trial

RATES = (2e-3, 3e-3, 4e-3, 6e-3, 8e-3, 12e-3, 16e-3, 24e-3)
"""Grid of the learning rate, for every setting and optimizer."""
MULTIPLIERS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Grid of Muon's rate over the rate of the rest."""
START_RATE, START_MULTIPLIER = 6e-3, 4.0
Row = dict[str, Any]


class Rows:
    """Finished runs, one line of JSON each; several processes may add to the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows: dict[str, Row] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = _row_of(line)
                self._rows |= {row["key"]: row} if row else {}

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, trial: Trial) -> Row | None:
        """The row of this run, under its present name."""
        row = self._rows.get(trial.key())
        return None if row is None else row | {"name": trial.setting.name}

    def add(self, row: Row) -> None:
        """Keep a row; one write, so that lines of several processes do not mix."""
        self._rows[row["key"]] = row
        line = ("\n" + json.dumps(row)).encode()  # a torn line before it stays a line of its own
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)


def _row_of(line: str) -> Row | None:
    """None: this line is empty or torn."""
    try:
        row = json.loads(line) if line else None
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and "key" in row else None


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What to run and where to keep it."""

    path: Path
    seeds: int
    cached: bool = False
    """Run nothing: only what the folder has."""
    verbose: bool = True


class MissingError(LookupError):
    """With `cached`: this run is not in the folder."""


class Worker:
    """Runs items one after the other."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.rows = Rows(orders.path)
        self.used: list[Row] = []

    def trial(self, setting: Setting, rate: tuple[float, float], seed: int) -> Row:
        """The row of one run; from the folder when it is there. Raises MissingError with `cached`."""
        trial = Trial(setting=setting, lr=rate[0], multiplier=rate[1], seed=seed)
        row = self.rows.get(trial)
        if row is None:
            if self.orders.cached:
                raise MissingError(setting.name)
            row = run_trial(trial)
            self.rows.add(row)
            if self.orders.verbose:
                words = f"lr {rate[0]:g}" + (f" x {rate[1]:g}" if rate[1] else "")
                print(f"{setting.name}: {words} seed {seed}: {row['loss']} ({row['took_s']} s)", file=sys.stderr)
        self.used.append(row)
        return row

    def item(self, item: Item, rates: dict[str, tuple[float, float]]) -> tuple[float, float]:
        """All runs of an item; returns its rate. `rates`: of items that this one may borrow from."""
        if isinstance(item.rate, float):
            rate = (item.rate, 0.0)
        elif item.rate == "search":
            rate = self.search(item.setting)
        elif item.rate in rates:
            rate = rates[item.rate]
        else:
            raise MissingError(item.rate)
        for seed in range(min(item.seeds, self.orders.seeds)):
            self.trial(item.setting, rate, seed)
        return rate

    def search(self, setting: Setting) -> tuple[float, float]:
        """(learning rate, Muon's multiplier or 0) with the lowest loss of seed 0."""

        def loss(rate: tuple[float, float]) -> float:
            value = self.trial(setting, rate, 0)["loss"]
            return math.inf if value is None else value

        if setting.optimizer == "adamw":
            return climb(RATES, START_RATE, lambda lr: loss((lr, 0.0))), 0.0
        multiplier = climb(MULTIPLIERS, START_MULTIPLIER, lambda m: loss((START_RATE, m)))
        lr = climb(RATES, START_RATE, lambda lr: loss((lr, multiplier)))
        return lr, climb(MULTIPLIERS, multiplier, lambda m: loss((lr, m)))


def climb(grid: Sequence[float], start: float, score: Callable[[float], float]) -> float:
    """The value of the grid whose neighbours both score worse, or its edge; asks as few as it can."""
    best = grid.index(start)
    for direction in (1, -1):
        moved = False
        while 0 <= best + direction < len(grid) and score(grid[best + direction]) < score(grid[best]):
            best, moved = best + direction, True
        if moved:
            break
    return grid[best]


def run_items(items: Sequence[Item], orders: Orders, jobs: int) -> tuple[list[Row], dict[str, tuple[float, float]]]:
    """All rows of these items, and the rate of each. Items that borrow a rate run after those they borrow from."""
    rates: dict[str, tuple[float, float]] = {}
    rows: dict[str, Row] = {}
    for stage in (
        [item for item in items if not _borrows(item)],
        [item for item in items if _borrows(item)],
    ):
        for name, rate, found in _run_stage(stage, rates, orders, jobs):
            rates |= {name: rate} if rate is not None else {}
            rows |= {f"{name} {row['key']}": row for row in found}
    return list(rows.values()), rates


def _borrows(item: Item) -> bool:
    return isinstance(item.rate, str) and item.rate != "search"


Outcome = tuple[str, tuple[float, float] | None, list[Row]]


def _run_stage(
    items: Sequence[Item], rates: dict[str, tuple[float, float]], orders: Orders, jobs: int
) -> list[Outcome]:
    if jobs <= 1 or len(items) <= 1:
        return [_run_item(item, rates, orders) for item in items]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_run_item, item, rates, orders) for item in items]
        return [future.result() for future in as_completed(futures)]


def _run_item(item: Item, rates: dict[str, tuple[float, float]], orders: Orders) -> Outcome:
    """One item, in whatever process this is; a rate of None: not complete."""
    torch.set_num_threads(1)
    worker = Worker(orders)
    try:
        rate = worker.item(item, rates)
    except MissingError:
        rate = None
    return item.setting.name, rate, worker.used

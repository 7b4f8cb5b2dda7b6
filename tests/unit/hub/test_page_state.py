"""What the hub reads again for each message to its watchers, and what it keeps."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.page_states import run as run_told

from ciuic.hub.api.endpoints import Desk
from ciuic.hub.api.view import SETTLED_S, HubFacts, StateSource
from ciuic.hub.membership.records import Run
from ciuic.net.messages import RunInfo


class Counting:
    """As much of a hub as the state is made of; counts how often a run's record is read."""

    def __init__(self, folder: Path, *, ended_ago_s: float | None) -> None:
        ended_at = None if ended_ago_s is None else time.time() - ended_ago_s
        state = "running" if ended_at is None else "finished"
        self.row = Run(run_id="demo-1", number=1, name="demo", job={}, state=state, ended_at=ended_at)
        self.open: set[str] = set()
        self.read = 0
        self.boot_id, self.started_at = "1-abc", 0.0
        self.config = SimpleNamespace(folder=folder)
        self.shelf = SimpleNamespace(peek=lambda run_id: object() if run_id in self.open else None)

    def node_infos(self) -> list[Any]:
        return []

    def runs(self, latest: int) -> list[Run]:
        return [self.row]

    def run_info(self, row: Run, *, full: bool) -> RunInfo:
        self.read += 1
        return run_told(row.run_id, state=row.state)


def told(hub: Counting, *, times: int) -> int:
    """How often the run's record was read for so many states."""
    stand_in: Any = hub
    source = StateSource(Desk(hub=stand_in), HubFacts(url="https://hub.example", version="0"))
    for _ in range(times):
        assert source.hub_info().runs[0].run_id == "demo-1"
    return hub.read


def test_the_record_of_a_run_that_ended_a_while_ago_is_read_once(tmp_path: Path) -> None:
    assert told(Counting(tmp_path, ended_ago_s=SETTLED_S + 1), times=5) == 1


def test_a_run_that_has_just_ended_is_read_every_time(tmp_path: Path) -> None:
    assert told(Counting(tmp_path, ended_ago_s=1.0), times=5) == 5


def test_a_run_at_work_is_read_every_time(tmp_path: Path) -> None:
    assert told(Counting(tmp_path, ended_ago_s=None), times=5) == 5


def test_a_run_whose_ledger_is_still_open_is_read_every_time(tmp_path: Path) -> None:
    hub = Counting(tmp_path, ended_ago_s=SETTLED_S + 1)
    hub.open.add("demo-1")
    assert told(hub, times=5) == 5


def test_a_run_that_was_resumed_is_read_again(tmp_path: Path) -> None:
    hub = Counting(tmp_path, ended_ago_s=SETTLED_S + 1)
    stand_in: Any = hub
    source = StateSource(Desk(hub=stand_in), HubFacts(url="https://hub.example", version="0"))
    assert source.hub_info().runs[0].state == "finished"
    hub.row = Run(run_id="demo-1", number=1, name="demo", job={}, state="running")
    assert source.hub_info().runs[0].state == "running"

"""A hub for the simulator: the real state machine, run queue and ledgers, without port, threads and database.

What `hub.core` does around them is done here in one thread and in the same order, which is `Effects.carry_out`'s: rows
are stored before anything is announced, then ledgers hear of it. After `kill` only what was stored is left.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from ciuic.errors import ConflictError
from ciuic.hub.membership.records import (
    OPEN_RUN,
    Action,
    Announce,
    CloseRun,
    Effects,
    Moment,
    Node,
    NodeGone,
    OpenRun,
    Run,
    WorkerEnded,
)
from ciuic.hub.membership.state import HubState
from ciuic.hub.run.checks import new_run
from ciuic.hub.run.rounds import RunLedger
from ciuic.hub.run.strays import STRAY_S, Strays
from ciuic.job import Job, parse_job

T = TypeVar("T")
TRAINING_BEGAN = "run.training"
WALL_S = 1_700_000_000.0


@dataclass(kw_only=True)
class Rows:
    """What is on the hub's disk besides ledgers: encoded, so that nothing is shared with what lives."""

    nodes: dict[str, bytes] = field(default_factory=dict)
    runs: dict[str, bytes] = field(default_factory=dict)
    epoch: int = 0

    def commit(self, out: Effects) -> None:
        """One transaction."""
        for node in out.nodes.values():
            self.nodes[node.node_id] = msgspec.json.encode(node)
        for run in out.runs.values():
            self.runs[run.run_id] = msgspec.json.encode(run)
        if out.epoch is not None:
            self.epoch = out.epoch

    def read_nodes(self) -> list[Node]:
        """Fresh objects."""
        return [msgspec.json.decode(row, type=Node) for row in self.nodes.values()]

    def read_runs(self) -> list[Run]:
        """Fresh objects."""
        return [msgspec.json.decode(row, type=Run) for row in self.runs.values()]


class Story:
    """The lines that the hub told: how many of each kind, and one digest of all."""

    def __init__(self, kept: int = 200) -> None:
        self.kinds: Counter[str] = Counter()
        self.latest: deque[Announce] = deque(maxlen=kept)
        self._digest = xxhash.xxh3_128()

    def tell(self, line: Announce) -> None:
        """One more."""
        self.kinds[line.kind] += 1
        self.latest.append(line)
        self._digest.update(f"{line.kind}\0{line.run_id}\0{line.node_id}\0{line.text}\n".encode())

    @property
    def digest(self) -> str:
        """Equal for equal stories."""
        return self._digest.hexdigest()


class SimHub:
    """One hub. Methods raise what the real one answers."""

    def __init__(self, folder: Path, *, clock: Callable[[], float], grace_s: float) -> None:
        self.folder, self.clock, self.grace_s = folder, clock, grace_s
        self.rows, self.story = Rows(), Story()
        self.wall_shift_s = 0.0
        self.is_up, self.is_paused = True, False
        self.backlog: list[Callable[[], None]] = []
        """Requests that wait in the kernel while the hub's process stands still."""
        self.on_wake: Callable[[str], None] = lambda node_id: None
        self.on_run: Callable[[str], None] = lambda run_id: None
        self.watcher: Callable[[Effects], None] = lambda out: None
        """Sees each event's effects when they are stored and nothing is announced yet."""
        self.errands_wait = False
        """Ledgers hear of what happened only with `run_errands`, as when the errands' thread is behind."""
        self.ledgers: dict[str, RunLedger] = {}
        self._errands: deque[Action] = deque()
        self._is_busy = False
        self._strays = Strays()
        self.state = self._born()

    # ---- life

    def _born(self) -> HubState:
        rows = self.rows
        state = HubState(epoch=rows.epoch, nodes=rows.read_nodes(), runs=rows.read_runs(), grace_s=self.grace_s)
        self.state = state
        self.change(state.start)
        for run in list(state.queue.runs.values()):
            if run.state in ("running", "stopping"):
                self._open(run.run_id)
        return state

    def kill(self) -> None:
        """kill -9: only rows and files are left."""
        self.is_up = False
        self._errands.clear()
        self._strays = Strays()
        for ledger in self.ledgers.values():
            ledger.close()
        self.ledgers = {}

    def restart(self) -> None:
        """A new process on what was stored."""
        self.is_up = True
        self._born()

    def resume(self) -> None:
        """The process goes on after it stood still; what waited for it comes now."""
        self.is_paused = False
        waiting, self.backlog = self.backlog, []
        for arrive in waiting:
            arrive()

    @property
    def moment(self) -> Moment:
        """Both clocks."""
        now_s = self.clock()
        return Moment(mono_s=now_s, wall_s=WALL_S + now_s + self.wall_shift_s)

    # ---- events

    def change(self, event: Callable[[Moment, Effects], T]) -> T:
        """Apply one event, store what it changed, then tell."""
        out = Effects()
        result = event(self.moment, out)
        out.carry_out(store=self._store, tell=self.story.tell, wake=self.on_wake, errand=self._errands.append)
        if self._errands and not self.errands_wait:
            self.run_errands()
        return result

    def _store(self, out: Effects) -> None:
        if out.needs_store:
            self.rows.commit(out)
        self.watcher(out)

    def say(self, line: Announce) -> None:
        """One line for the story."""

        def event(_: Moment, out: Effects) -> None:
            out.add(line)
            if line.kind == TRAINING_BEGAN:
                self.state.queue.has_begun(line.run_id, out)

        self.change(event)

    def enrol(self, node_id: str, location: str) -> None:
        """A node gets its identity."""
        number = 1 + len(self.state.nodes)
        node = Node(node_id=node_id, serial=str(number), number=number, location=location)
        self.change(lambda now, out: self.state.enrol(now, node, out))

    def submit(self, job: Job) -> str:
        """Queue a run; returns its id."""
        number = 1 + len(self.state.queue.runs)
        run = new_run(job, number=number, submit_token="", wall_s=self.moment.wall_s)
        self.change(lambda now, out: self.state.queue.submit(now, run, out))
        return run.run_id

    def ledger(self, run_id: str) -> RunLedger:
        """Of a run at work. Raises NotFoundError, ConflictError."""
        run = self.state.queue.get(run_id)
        at_work = run.state in ("running", "stopping") or (
            run.state == "finished" and bool(self.state.queue.names(run_id))
        )
        if not at_work:
            raise ConflictError(f"{run_id} is {run.state}", cause=run.reason)
        return self.ledgers.get(run_id) or self._open(run_id)

    def check_assigned(self, run_id: str, node_id: str) -> None:
        """Only nodes of a run take a place in it. Raises ConflictError."""
        node = self.state.nodes.get(node_id)
        if node is None or node.run_id != run_id:
            raise ConflictError(f"{node_id} is not assigned to {run_id}")

    def tick(self) -> None:
        """What the hub does four times a second."""
        self.change(self.state.tick)
        for run in list(self.state.queue.runs.values()):
            if run.state in ("running", "stopping"):
                self._tick_run(run.run_id)

    def run_errands(self) -> None:
        """What the state machine wants of ledgers, in order."""
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._errands:
                self._do(self._errands.popleft())
        finally:
            self._is_busy = False

    # ---- inside

    def _do(self, action: Action) -> None:
        if isinstance(action, OpenRun):
            if self.state.queue.get(action.run_id).state in OPEN_RUN:
                self.ledger(action.run_id)
        elif isinstance(action, CloseRun):
            self._close(action.run_id)
        elif isinstance(action, WorkerEnded):
            if action.run_id in self.ledgers:
                self.ledgers[action.run_id].node_gone(action.node_id)
        elif isinstance(action, NodeGone):
            ledger = self.ledgers.get(action.run_id)
            line = action.line_with(ledger.node_gone(action.node_id) if ledger is not None else 0)
            if line is not None:
                self.say(line)

    def _open(self, run_id: str) -> RunLedger:
        def emit(kind: str, text: str, node_id: str, data: dict[str, Any]) -> None:
            self.say(Announce(kind=kind, text=text, run_id=run_id, node_id=node_id, data=data))

        job = parse_job(self.state.queue.get(run_id).job)
        ledger = RunLedger.open(
            self.folder / run_id, job, run_id=run_id, clock=self.clock, emit=emit, wake=lambda: self.on_run(run_id)
        )
        self._reconcile(run_id, ledger)
        self.ledgers[run_id] = ledger
        return ledger

    def _tick_run(self, run_id: str) -> None:
        ledger = self.ledger(run_id)
        self._reconcile(run_id, ledger, after_s=STRAY_S)
        ledger.tick()
        if ledger.finished:
            line = Announce(kind="run.finished", run_id=run_id, text=f"{run_id} finished")
            self.change(lambda now, out: self.state.queue.finish(now, run_id, line, out))

    def _reconcile(self, run_id: str, ledger: RunLedger, *, after_s: float = 0.0) -> None:
        members = self.state.queue.names(run_id)
        for node in self._strays.gone(run_id, ledger.present(), members, now_s=self.clock(), after_s=after_s):
            ledger.node_gone(node)

    def _close(self, run_id: str) -> None:
        run = self.state.queue.get(run_id)
        ledger = self.ledgers.get(run_id)
        if ledger is not None and run.state not in OPEN_RUN and not self.state.queue.names(run_id):
            self.ledgers.pop(run_id).close()

"""What the hub remembers of nodes and runs, and what its state machine asks to be done.

`Node` and `Run` are the durable rows (stored as JSON); `Pulse` is what is known only since the hub started.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ciuic.net.messages import RunState, WorkerFault, WorkerReport, WorkerState

Presence = Literal["here", "suspect", "dead", "left", "evicted"]

ACTIVE_WORKER: frozenset[WorkerState] = frozenset({"starting", "running"})
OPEN_RUN: frozenset[RunState] = frozenset({"waiting", "running", "stopping"})
SUPERSEDED_KEPT = 32


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of both clocks of the hub: spans are measured on `mono_s`, people are shown `wall_s`."""

    mono_s: float
    wall_s: float


class Node(msgspec.Struct, kw_only=True):
    """One member of the network."""

    node_id: str
    serial: str
    """Serial number of its certificate."""
    number: int
    """Order of joining."""
    location: str
    presence: Presence = "here"
    incarnation: str = ""
    """Of the agent process that speaks for the node; empty until its first beat."""
    superseded: list[str] = []
    """Earlier incarnations, which are refused."""
    draining: bool = False
    allow_code: bool = False
    run_id: str = ""
    """The run the node is assigned to; a node is in at most one by construction."""
    revision: int = 0
    """Of what the hub wants from the node; grows with each change."""
    assigned_revision: int = 0
    """Revision with which the present assignment came: agents that do not know it yet report about the past."""
    claimed: dict[str, float] = {}
    measured: dict[str, float] = {}
    measured_at: float | None = None
    """When links and speeds were measured, on the hub's clock (seconds since 1970)."""
    facts: dict[str, str] = {}


class Run(msgspec.Struct, kw_only=True):
    """One execution of a job."""

    run_id: str
    number: int
    """Order of submission."""
    name: str
    job: dict[str, Any]
    min_nodes: int = 1
    max_nodes: int | None = None
    locations: list[str] = []
    require: dict[str, float] = {}
    """What was measured on a node must be at least this (hub.selection)."""
    replace: Literal["spare", "wait", "never"] = "spare"
    """Who gets the place of a dead node where `max_nodes` limits the places."""
    replace_after_s: float = 60.0
    away: list[str] = []
    """Lost nodes whose place is kept for them."""
    gaps: list[str] = []
    """Lost nodes whose place is for whoever is free."""
    grace_s: float = 10.0
    needs_code: bool = False
    """The job brings its own code; only nodes that allow it are taken."""
    submit_token: str = ""
    state: RunState = "waiting"
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    attempt: int = 1
    has_trained: bool = False
    """Its ledger has seen enough workers and began to lease samples."""
    failed: dict[str, str] = {}
    """Nodes whose worker failed beyond its restart budget, with the exception line."""
    faults: dict[str, WorkerFault] = {}
    """Where they failed."""
    restarts: dict[str, str] = {}
    """Nodes whose worker failed and was started again: how often, and why the last time."""


@dataclass(slots=True, kw_only=True)
class Pulse:
    """What is known of a node since the hub started; never stored."""

    heard_s: float
    """Monotonic time of the last beat, or of the hub's start, or of joining."""
    beat_s: float | None = None
    """Monotonic time of the last beat."""
    sequence: int = -1
    worker: WorkerReport = field(default_factory=WorkerReport)
    saved_s: float = 0.0
    """Monotonic time at which measured values were last asked to be stored."""
    measure_asked: int = 0
    """Ticket of the latest wish of an operator that the node measures itself again; 0: none."""
    measure_done: int = 0
    """Ticket of the latest such wish that the node has fulfilled."""


# ---- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Announce:
    """One line for the story."""

    kind: str
    text: str
    run_id: str = ""
    node_id: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeGone:
    """A node is no longer in a run: its leased samples go back. The line is told after that, with their number."""

    run_id: str
    node_id: str
    line: Announce | None = None

    def line_with(self, returned: int | None) -> Announce | None:
        """The line when so many samples went back."""
        line = self.line
        if line is None or not returned:
            return line
        text = f"{line.text}; its {returned:,} leased samples went back"
        data = {**line.data, "samples": returned}
        return Announce(kind=line.kind, text=text, run_id=line.run_id, node_id=line.node_id, data=data)


@dataclass(frozen=True, kw_only=True)
class WorkerEnded:
    """The agent says that its worker has ended without an error: nobody trains its leased samples any more."""

    run_id: str
    node_id: str


@dataclass(frozen=True, kw_only=True)
class Wake:
    """The hub wants something else from this node: answer its held heartbeat."""

    node_id: str


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run is about to train: open its ledger before its nodes hear of it."""

    run_id: str


@dataclass(frozen=True, kw_only=True)
class CloseRun:
    """A run has ended and no worker is left: keep what it reports and close its ledger."""

    run_id: str


Action = Announce | NodeGone | WorkerEnded | Wake | OpenRun | CloseRun


class Effects(msgspec.Struct):
    """What one event asks for. Rows and epoch are stored, with the announced lines, before anything is answered."""

    nodes: dict[str, Node] = {}
    runs: dict[str, Run] = {}
    epoch: int | None = None
    actions: list[Action] = []

    def save_node(self, node: Node) -> None:
        self.nodes[node.node_id] = node

    def save_run(self, run: Run) -> None:
        self.runs[run.run_id] = run

    def add(self, action: Action) -> None:
        self.actions.append(action)

    def carry_out(
        self,
        *,
        store: Callable[["Effects"], object],
        tell: Callable[[Announce], object],
        wake: Callable[[str], object],
        errand: Callable[[Action], object],
    ) -> None:
        """The one order for every hub: all is stored before any of it is told; errands for ledgers go in sequence."""
        store(self)
        for action in self.actions:
            if isinstance(action, Announce):
                tell(action)
            elif isinstance(action, Wake):
                wake(action.node_id)
            else:
                errand(action)

    def then(self, later: "Effects") -> "Effects":
        """These and, after them, later ones."""
        return Effects(
            nodes={**self.nodes, **later.nodes},
            runs={**self.runs, **later.runs},
            epoch=self.epoch if later.epoch is None else later.epoch,
            actions=[*self.actions, *later.actions],
        )

    @property
    def needs_store(self) -> bool:
        """Something must be durable before the answer."""
        return bool(self.nodes or self.runs or self.epoch is not None or (self.actions and self.announced))

    @property
    def announced(self) -> list[Announce]:
        return [action for action in self.actions if isinstance(action, Announce)]

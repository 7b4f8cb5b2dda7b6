"""What must hold in a simulation: watched while it runs, and proven from the files when it has ended."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ciuic.hub.membership.records import Announce, Effects, Node, NodeGone, Run
from ciuic.hub.run.rounds import RunLedger
from ciuic.ledger.intervals import IntervalSet

if TYPE_CHECKING:
    from ciuic.lab.sim import Simulation

MOST_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Each invariant by name, and what was found where one does not hold."""

    holds: dict[str, bool]
    problems: list[str] = field(default_factory=list)
    samples: dict[str, int] = field(default_factory=dict)

    @property
    def all_hold(self) -> bool:
        """Every invariant."""
        return all(self.holds.values())


class Watch:
    """Looks at each event's effects once they are stored, before anything is announced."""

    def __init__(self, simulation: "Simulation") -> None:
        self._sim = simulation
        self.problems: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self._epoch = simulation.hub.rows.epoch
        self._revisions: dict[str, int] = {}
        self._evicted: set[str] = set()
        self._runs: dict[str, str] = {}
        """Node -> its run, by what the effects said."""
        self._sizes: Counter[str] = Counter()
        simulation.hub.watcher = self.see

    def blame(self, name: str, text: str) -> None:
        """An invariant does not hold."""
        self.problems[name] += 1
        self.first.setdefault(name, f"at {self._sim.timeline.now_s:.1f} s: {text}")

    def see(self, out: Effects) -> None:
        """One event."""
        if out.epoch is None and not out.actions and not out.nodes:
            return  # most heartbeats change nothing
        if out.epoch is not None:
            if out.epoch <= self._epoch:
                self.blame("epoch_grows", f"epoch {out.epoch} after {self._epoch}")
            self._epoch = out.epoch
        for action in out.actions:
            if isinstance(action, NodeGone):
                self._gone(action)
            elif isinstance(action, Announce):
                self._told(action)
        for node in out.nodes.values():
            self._node(node)

    def _gone(self, action: NodeGone) -> None:
        run_id = self._runs.pop(action.node_id, "")
        self._sizes[run_id] -= 1
        if run_id != action.run_id:
            self.blame("one_run_per_node", f"{action.node_id} left {action.run_id}, it was in {run_id or 'none'}")
        if action.line is not None:
            self._told(action.line)

    def _told(self, line: Announce) -> None:
        if line.kind in ("node.suspect", "node.dead"):
            node = self._sim.nodes[line.node_id]
            row = msgspec.json.decode(self._sim.hub.rows.nodes[line.node_id], type=Node)
            if line.kind == "node.dead" and row.presence != "dead":
                self.blame("stored_before_told", f"{line.node_id} was called dead before that was stored")
            if line.kind == "node.dead" and self._sim.timeline.now_s > node.hurt_until_s:
                self.blame("nobody_healthy_dies", f"{line.text}, and nothing was wrong with it")

    def _node(self, node: Node) -> None:
        name = node.node_id
        if node.revision < self._revisions.get(name, 0):
            self.blame("revisions_grow", f"{name} went back to revision {node.revision}")
        self._revisions[name] = node.revision
        if name in self._evicted and node.presence != "evicted":
            self.blame("evicted_is_final", f"{name} came back as {node.presence}")
        if node.presence == "evicted":
            self._evicted.add(name)
        before = self._runs.get(name, "")
        if node.run_id and node.run_id != before:
            if before:
                self.blame("one_run_per_node", f"{name} went from {before} to {node.run_id} without leaving it")
            self._runs[name] = node.run_id
            self._sizes[node.run_id] += 1
            run = self._sim.hub.state.queue.runs[node.run_id]
            if run.max_nodes is not None and self._sizes[node.run_id] > run.max_nodes:
                self.blame("never_more_than_max", f"{run.run_id} has {self._sizes[node.run_id]} nodes")


WATCHED = (
    "epoch_grows",
    "revisions_grow",
    "one_run_per_node",
    "never_more_than_max",
    "evicted_is_final",
    "stored_before_told",
    "nobody_healthy_dies",
)


def prove(simulation: "Simulation") -> Proof:
    """Everything that can be seen at the end: from the hub's memory, from its files, and from the nodes."""
    watch = simulation.watch
    ledger = _reopened(simulation)
    try:
        _prove_end(simulation, ledger)
        _prove_chain(simulation, ledger)
        samples = _prove_samples(simulation, ledger)
        _prove_nodes(simulation, ledger)
        _prove_rows(simulation)
    finally:
        ledger.close()
    names = (*WATCHED, *ENDS)
    problems = [f"{name}: {watch.first[name]} ({watch.problems[name]} times)" for name in names if name in watch.first]
    return Proof(
        holds={name: name not in watch.problems for name in names}, problems=problems[:MOST_PROBLEMS], samples=samples
    )


ENDS = (
    "run_finished",
    "versions_chained",
    "no_push_twice",
    "samples_exactly_once",
    "bases_equal",
    "files_tell_the_same",
    "rows_are_current",
    "everybody_came_home",
)


def _reopened(simulation: "Simulation") -> RunLedger:
    """The run's ledger read from its files, as after a restart."""
    run_id = simulation.common.run_id
    live = simulation.hub.ledgers.pop(run_id, None)
    if live is not None:
        live.close()
    clock = simulation.hub.clock
    return RunLedger.open(
        simulation.hub.folder / run_id,
        simulation.job,
        run_id=run_id,
        clock=clock,
        emit=lambda kind, text, node, data: None,
        wake=lambda: None,
    )


def _prove_end(simulation: "Simulation", ledger: RunLedger) -> None:
    run = simulation.hub.state.queue.runs[simulation.common.run_id]
    if run.state != "finished" or not ledger.samples.complete:
        reason = run.reason or "it says nothing"
        simulation.watch.blame("run_finished", f"{run.run_id} is {run.state} ({reason})")


def _prove_chain(simulation: "Simulation", ledger: RunLedger) -> None:
    common, watch, store = simulation.common, simulation.watch, ledger.local_fragments()[0].store
    merged: Counter[tuple[str, int, int]] = Counter()
    for version, known in enumerate(common.entries, start=1):
        header = known.entry.header
        if (header.version, header.previous_digest) != (version, common.digests[version - 1]):
            watch.blame("versions_chained", f"version {version} does not follow {version - 1}")
        merged.update((c.node, c.incarnation, c.sequence) for c in header.contributors)
    if store.version != len(common.entries):
        watch.blame("files_tell_the_same", f"{store.version} entries on disk, {len(common.entries)} were seen")
    if ledger.fragments[0].digest != common.digests[-1]:
        watch.blame("files_tell_the_same", "the files give another base")
    twice = [key for key, count in merged.items() if count > 1]
    if twice:
        watch.blame("no_push_twice", f"{len(twice)} pushes, first {twice[0]}")


def _prove_samples(simulation: "Simulation", ledger: RunLedger) -> dict[str, int]:
    """Counted again from the entries alone."""
    committed, reported = IntervalSet(), 0
    for known in simulation.common.entries:
        for contributor in known.entry.header.contributors:
            for start, stop in contributor.ranges:
                reported += stop - start
                committed.add(start, stop)
    books = ledger.info(full=False)["samples"]
    counts = {"total": books.total, "committed": len(committed), "duplicated": reported - len(committed)}
    counts["lost"] = books.total - len(committed)
    told = (books.committed, books.duplicated, books.lost)
    if told != (counts["committed"], counts["duplicated"], 0):
        simulation.watch.blame("samples_exactly_once", f"the books say {books}, the entries {counts}")
    if counts["lost"] or (counts["duplicated"] and not simulation.trouble.counts):
        simulation.watch.blame("samples_exactly_once", f"{counts}")
    return counts


def _prove_nodes(simulation: "Simulation", ledger: RunLedger) -> None:
    common, watch = simulation.common, simulation.watch
    for (node_id, _), (version, digest) in simulation.desk.finals.items():
        if (version, digest) != (ledger.fragments[0].version, common.digests[-1]):
            watch.blame("bases_equal", f"{node_id} ended with version {version}, {digest[:8]}")
    state = simulation.hub.state
    for node in simulation.nodes.values():
        shown = state.shown_state(state.nodes[node.node_id])
        is_well = node.agents and not node.is_over and simulation.timeline.now_s > node.hurt_until_s
        if is_well and shown not in ("idle", "suspect"):
            watch.blame("everybody_came_home", f"{node.node_id} is {shown}")
        if not node.agents and not node.is_over and shown not in ("dead", "left"):
            watch.blame("everybody_came_home", f"{node.node_id} has no agent and is {shown}")


def _prove_rows(simulation: "Simulation") -> None:
    """What is stored is what the hub has in mind."""
    hub, watch = simulation.hub, simulation.watch
    for row in hub.rows.read_nodes():
        if row != hub.state.nodes[row.node_id]:
            watch.blame("rows_are_current", f"{row.node_id} is stored otherwise than it is")
    for run in hub.rows.read_runs():
        if _plain(run) != _plain(hub.state.queue.runs[run.run_id]):
            watch.blame("rows_are_current", f"{run.run_id} is stored otherwise than it is")


def _plain(run: Run) -> object:
    return msgspec.to_builtins(run)

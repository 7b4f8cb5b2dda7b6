"""Who is in the network: a pure state machine (events in, effects out; no sockets, no files, no clock).

`now.mono_s` is the hub's monotonic clock, so nothing depends on anyone's wall clock. Presence of a node:

    here -> suspect (silent for 0.3 grace) -> dead (silent for grace) -> here again with its next beat
    here, suspect, dead -> left (says so)   -> here again with a new agent process
    any -> evicted, which is final

A restart of the hub counts as having heard of everybody: its own outage never kills a healthy node.
"""

from collections.abc import Iterable

import msgspec

from ciuic.errors import CertificateError, ConflictError, NotFoundError, SupersededError
from ciuic.hub.membership.records import SUPERSEDED_KEPT, Announce, Effects, Moment, Node, Presence, Pulse, Run, Wake
from ciuic.hub.membership.runqueue import RunQueue
from ciuic.net.messages import HeartbeatRequest, NodeInfo, NodeState

SUSPECT_SHARE = 0.3
BEATS_PER_GRACE = 5.0
MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 0.05, 2.0
FIRST_BEAT_S = 15.0
"""Least silence that is granted before the first beat after a start of the hub, or after joining: agents that lost
the hub try again every few seconds."""
MEASURED_SAVE_S = 60.0
ROUNDING = 1e-3
"""Nodes are looked at so much earlier than they may be suspect: a difference of clock readings is rounded."""
STOOD_STILL_S = 1.0
"""Ticks come several times a second; a longer pause between two of them was the hub's own."""


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """What the hub wants from one node now."""

    revision: int
    run: Run | None
    stop_worker: bool
    heartbeat_s: float
    measure_ticket: int = 0


class HubState:
    """Nodes, runs and the membership epoch. Not thread-safe: its owner holds a lock."""

    def __init__(self, *, epoch: int, nodes: Iterable[Node], runs: Iterable[Run], grace_s: float) -> None:
        self.epoch = epoch
        self.grace_s = grace_s
        self.nodes = {node.node_id: node for node in sorted(nodes, key=lambda node: node.number)}
        self.pulses = {node_id: Pulse(heard_s=0.0) for node_id in self.nodes}
        self.queue = RunQueue(self.nodes, self.pulses, runs)
        self._ticked_s = 0.0

    # ---- events ----------------------------------------------------------------------------------------------------

    def start(self, now: Moment, out: Effects) -> None:
        """The hub has started: every node that has not left is granted its grace from now on."""
        self._ticked_s = now.mono_s
        for node_id, node in self.nodes.items():
            self.pulses[node_id].heard_s = now.mono_s
            if node.presence == "suspect":
                node.presence = "here"
                out.save_node(node)
        self._new_epoch(out)
        self.queue.restart(now)
        self.queue.schedule(now, out)

    def enrol(self, now: Moment, node: Node, out: Effects) -> None:
        """A node has got its certificate."""
        self.nodes[node.node_id] = node
        self.pulses[node.node_id] = Pulse(heard_s=now.mono_s)
        self.queue.forget_members()
        out.save_node(node)
        self._new_epoch(out)
        out.add(Announce(kind="node.joined", node_id=node.node_id, text=f"{node.node_id} joined"))

    def forget(self, node_id: str) -> None:
        """Undo `enrol`: it could not be stored."""
        self.nodes.pop(node_id, None)
        self.pulses.pop(node_id, None)
        self.queue.forget_members()

    def beat(self, now: Moment, node_id: str, request: HeartbeatRequest, out: Effects) -> None:
        """One heartbeat. Raises CertificateError (evicted), SupersededError (another process took over)."""
        node = self._allowed(node_id, request.agent_incarnation)
        pulse = self.pulses[node_id]
        if request.agent_incarnation != node.incarnation:
            if len(node.superseded) >= SUPERSEDED_KEPT and request.known_revision > 0:
                raise _superseded(node_id)  # it was answered before, so it is not new, but one of those forgotten since
            self._supersede(node, request.agent_incarnation, out)
            pulse.sequence = -1
        if request.sequence <= pulse.sequence:
            return  # a copy or a straggler: it proves nothing about now
        silence_s, before = now.mono_s - pulse.heard_s, _freedom(pulse)
        pulse.sequence, pulse.beat_s, pulse.heard_s = request.sequence, now.mono_s, now.mono_s
        self._return(node, silence_s, out)
        self._learn(now, node, request, out)
        self.queue.heed(now, node, request.worker, request.known_revision, out)
        is_news = out.nodes or out.runs or _freedom(pulse) != before
        if is_news and not node.run_id:
            self.queue.schedule(now, out)  # it looks at every node: only when this one may be given a run

    def leave(self, now: Moment, node_id: str, incarnation: str, out: Effects) -> None:
        """The agent says goodbye; its incarnation ends with that. Raises CertificateError, SupersededError."""
        node = self.nodes.get(node_id)
        if node is not None and node.presence == "left" and node.superseded[-1:] == [incarnation]:
            return  # the same goodbye again: the answer to the first was lost
        node = self._allowed(node_id, incarnation)
        if incarnation != node.incarnation:
            self._supersede(node, incarnation, out)
        node.superseded = [*node.superseded, incarnation][-SUPERSEDED_KEPT:]
        node.incarnation = ""
        self._take_out(now, node, "left", Announce(kind="node.left", node_id=node_id, text=f"{node_id} left"), out)

    def evict(self, now: Moment, node_id: str, by: str, out: Effects) -> None:
        """Close the door for good. Raises NotFoundError."""
        node = self.nodes.get(node_id)
        if node is None:
            raise NotFoundError(f"there is no node {node_id[:80]!r}", next="list the nodes with: ciuic nodes")
        if node.presence != "evicted":
            text = f"{node_id} was evicted by {by}; its certificate is no longer accepted"
            self._take_out(now, node, "evicted", Announce(kind="node.evicted", node_id=node_id, text=text), out)

    def ask_measure(self, now: Moment, node_id: str, out: Effects) -> int:
        """Let the node measure itself with its next beat; the ticket. Raises NotFoundError, ConflictError."""
        node = self.nodes.get(node_id)
        if node is None:
            raise NotFoundError(f"there is no node {node_id[:80]!r}", next="list the nodes with: ciuic nodes")
        if node.presence != "here":
            raise ConflictError(f"{node_id} cannot measure itself now", cause=f"it is {node.presence}")
        pulse = self.pulses[node_id]
        pulse.measure_asked = max(pulse.measure_asked + 1, int(now.wall_s * 1000))
        node.revision += 1
        out.save_node(node)
        out.add(Wake(node_id=node_id))
        return pulse.measure_asked

    def tick(self, now: Moment, out: Effects) -> None:
        """Let time pass: silence makes nodes suspect, then dead."""
        self._forgive_own_absence(now)
        for node_id in self._long_unheard(now):
            node = self.nodes[node_id]
            if node.presence in ("here", "suspect"):
                self._judge_silence(now, node, out)
        self.queue.tick(now, out)
        self.queue.schedule(now, out)

    # ---- questions -------------------------------------------------------------------------------------------------

    def desired(self, node_id: str, incarnation: str) -> Desired:
        """What to answer to this agent process. Raises CertificateError, SupersededError."""
        node = self._allowed(node_id, incarnation)
        return Desired(
            revision=node.revision,
            run=self.queue.runs.get(node.run_id),
            stop_worker=self.queue.wants_stop(node),
            heartbeat_s=self.heartbeat_s(node),
            measure_ticket=self.pulses[node_id].measure_asked,
        )

    def heartbeat_s(self, node: Node) -> float:
        """How often the node should be heard: a fifth of its grace."""
        beat_s = self.grace_of(node) / BEATS_PER_GRACE
        return MAX_HEARTBEAT_S if beat_s >= MAX_HEARTBEAT_S else max(MIN_HEARTBEAT_S, beat_s)

    def grace_of(self, node: Node) -> float:
        """Silence after which the node is dead: its job's, or the hub's own outside a run."""
        run = self.queue.runs.get(node.run_id)
        return run.grace_s if run is not None else self.grace_s

    def shown_state(self, node: Node) -> NodeState:
        """One word for people."""
        if node.presence != "here":
            return node.presence
        if node.draining:
            return "draining"
        if not node.run_id:
            return "idle"
        return "training" if self.pulses[node.node_id].worker.state == "running" else "assigned"

    def node_info(self, node: Node, now_s: float) -> NodeInfo:
        """What people see of a node."""
        pulse = self.pulses[node.node_id]
        return NodeInfo(
            node_id=node.node_id,
            location=node.location,
            state=self.shown_state(node),
            claimed=node.claimed,
            measured=node.measured,
            measured_at=node.measured_at,
            measure_ticket=pulse.measure_done,
            allow_code=node.allow_code,
            facts=node.facts,
            run_id=node.run_id,
            worker=pulse.worker,
            last_seen_s=None if pulse.beat_s is None else max(0.0, now_s - pulse.beat_s),
        )

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _allowed(self, node_id: str, incarnation: str) -> Node:
        node = self.nodes.get(node_id)
        if node is None or node.presence == "evicted":
            cause = "it was evicted" if node is not None else "it is not in this hub's records"
            raise CertificateError(
                f"the hub does not accept {node_id}", cause=cause, next="ask the operator for a new join token"
            )
        if incarnation in node.superseded:
            raise _superseded(node_id)
        return node

    def _supersede(self, node: Node, incarnation: str, out: Effects) -> None:
        if node.incarnation:
            node.superseded = [*node.superseded, node.incarnation][-SUPERSEDED_KEPT:]
            if node.presence in ("here", "suspect"):
                text = f"{node.node_id} has a new agent process; the earlier one is refused"
                out.add(Announce(kind="node.restarted", node_id=node.node_id, text=text))
        node.incarnation = incarnation
        node.draining = False
        node.revision += 1
        out.save_node(node)
        out.add(Wake(node_id=node.node_id))

    def _return(self, node: Node, silence_s: float, out: Effects) -> None:
        """The node was heard: whatever it was before, it is here now."""
        was = node.presence
        if was == "here":
            return
        node.presence = "here"
        out.save_node(node)
        kind, text = {
            "suspect": ("node.back", f"{node.node_id} is back after {silence_s:.1f} s of silence"),
            "dead": ("node.revived", f"{node.node_id} is back from the dead after {silence_s:.0f} s of silence"),
        }.get(was, ("node.joined", f"{node.node_id} joined again"))
        out.add(Announce(kind=kind, node_id=node.node_id, text=text))
        if was != "suspect":
            self._new_epoch(out)

    def _learn(self, now: Moment, node: Node, request: HeartbeatRequest, out: Effects) -> None:
        """What the beat says about the node; measured values change all the time and are stored once a minute."""
        pulse = self.pulses[node.node_id]
        location, claimed = request.location or node.location, request.claimed or node.claimed
        facts, code = request.facts or node.facts, request.allow_code
        if location != node.location or claimed != node.claimed or facts != node.facts or code != node.allow_code:
            node.location, node.claimed, node.facts, node.allow_code = location, claimed, facts, code
            out.save_node(node)
        pulse.measure_done = request.measure_ticket
        if request.measured_age_s is not None:
            node.measured_at = now.wall_s - request.measured_age_s
        if request.measured and request.measured != node.measured:
            is_first = not node.measured
            node.measured = request.measured
            if is_first or now.mono_s - pulse.saved_s >= MEASURED_SAVE_S:
                pulse.saved_s = now.mono_s
                out.save_node(node)
        if request.draining != node.draining:
            node.draining = request.draining
            node.revision += 1
            out.save_node(node)
            text = f"{node.node_id} is draining: it finishes its step and takes no new work"
            if not node.draining:
                text = f"{node.node_id} takes work again"
            kind = "node.draining" if node.draining else "node.resumed"
            out.add(Announce(kind=kind, node_id=node.node_id, text=text))
            self._new_epoch(out)

    def _forgive_own_absence(self, now: Moment) -> None:
        """The hub itself stood still (stopped process, stalled disk): nobody is blamed for that time."""
        absence_s = now.mono_s - self._ticked_s
        self._ticked_s = now.mono_s
        if absence_s > STOOD_STILL_S:
            for pulse in self.pulses.values():
                pulse.heard_s = min(now.mono_s, pulse.heard_s + absence_s)

    def _long_unheard(self, now: Moment) -> list[str]:
        """Every node that may be suspect or dead by now, in order of joining; few of them are."""
        shortest_s = min(self.grace_s, min((run.grace_s for run in self.queue.runs.values()), default=self.grace_s))
        late_s = now.mono_s - SUSPECT_SHARE * shortest_s * (1 - ROUNDING)
        return [node_id for node_id, pulse in self.pulses.items() if pulse.heard_s <= late_s]

    def _judge_silence(self, now: Moment, node: Node, out: Effects) -> None:
        pulse = self.pulses[node.node_id]
        silence_s, grace_s = now.mono_s - pulse.heard_s, self.grace_of(node)
        if pulse.beat_s is None:
            grace_s = max(grace_s, FIRST_BEAT_S)
        if silence_s >= grace_s:
            text = f"{node.node_id} is dead after {silence_s:.0f} s of silence"
            self._take_out(now, node, "dead", Announce(kind="node.dead", node_id=node.node_id, text=text), out)
        elif silence_s >= SUSPECT_SHARE * grace_s and node.presence == "here":
            node.presence = "suspect"
            out.save_node(node)
            text = f"{node.node_id} is silent for {silence_s:.1f} s: suspect"
            out.add(Announce(kind="node.suspect", node_id=node.node_id, run_id=node.run_id, text=text))

    def _take_out(self, now: Moment, node: Node, presence: Presence, line: Announce, out: Effects) -> None:
        """The node is dead, has left or was evicted: it leaves its run and the membership."""
        run_id = node.run_id
        node.presence = presence
        out.save_node(node)
        self._new_epoch(out)
        named = Announce(kind=line.kind, text=line.text, run_id=run_id, node_id=node.node_id)
        self.queue.release(node, out, named)
        out.add(Wake(node_id=node.node_id))
        self.queue.left_by(now, run_id, out)
        self.queue.schedule(now, out)

    def _new_epoch(self, out: Effects) -> None:
        self.epoch += 1
        out.epoch = self.epoch


def _superseded(node_id: str) -> SupersededError:
    return SupersededError(
        f"another process speaks for {node_id} now",
        cause="a newer agent with the same identity has started, or this one has said goodbye",
        next="stop this agent; give each node its own identity",
    )


def _freedom(pulse: Pulse) -> tuple[bool, str, str]:
    """What a beat says about whether its node could be given a run."""
    return pulse.beat_s is None, pulse.worker.run_id, pulse.worker.state

"""A hub's state machine with a hand-moved clock, for tests without sockets."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ciuic.hub.membership.records import Announce, Effects, Moment, Node, Run
from ciuic.hub.membership.state import HubState
from ciuic.net.messages import HeartbeatRequest, WorkerReport

T = TypeVar("T")
GRACE_S = 10.0


class World:
    """One HubState, its clock, its story, and the agents that speak to it."""

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self.now_s = 1000.0
        self.grace_s = grace_s
        self.state = HubState(epoch=0, nodes=[], runs=[], grace_s=grace_s)
        self.story: list[Announce] = []
        self.effects: list[Effects] = []
        self.sequences: dict[str, int] = {}
        self.watcher: Callable[[Effects], None] = lambda effects: None
        self.apply(lambda out: self.state.start(self.moment, out))

    @property
    def moment(self) -> Moment:
        return Moment(mono_s=self.now_s, wall_s=1_700_000_000.0 + self.now_s)

    def apply(self, event: Callable[[Effects], None]) -> Effects:
        out = Effects()
        event(out)
        self.effects.append(out)
        self.watcher(out)
        for action in out.actions:
            line = action if isinstance(action, Announce) else getattr(action, "line", None)
            if line is not None:
                self.story.append(line)
        return out

    def kinds(self) -> list[str]:
        return [line.kind for line in self.story]

    def texts(self) -> list[str]:
        return [line.text for line in self.story]

    # ---- events ----

    def enrol(self, location: str) -> str:
        number = len(self.state.nodes) + 1
        node_id = location if location not in self.state.nodes else f"{location}-{number}"
        node = Node(node_id=node_id, serial=str(number), number=number, location=location)
        self.apply(lambda out: self.state.enrol(self.moment, node, out))
        return node_id

    def beat(self, node_id: str, *, incarnation: str = "a", known: int | None = None, **fields: Any) -> Effects:
        key = f"{node_id}/{incarnation}"
        self.sequences[key] = self.sequences.get(key, 0) + 1
        request = HeartbeatRequest(
            agent_incarnation=incarnation,
            sequence=int(fields.pop("sequence", self.sequences[key])),
            known_revision=self.state.nodes[node_id].revision if known is None else known,
            worker=fields.pop("worker", WorkerReport()),
            **fields,
        )
        return self.apply(lambda out: self.state.beat(self.moment, node_id, request, out))

    def join(self, location: str) -> str:
        node_id = self.enrol(location)
        self.beat(node_id)
        return node_id

    def leave(self, node_id: str, incarnation: str = "a") -> None:
        self.apply(lambda out: self.state.leave(self.moment, node_id, incarnation, out))

    def evict(self, node_id: str) -> None:
        self.apply(lambda out: self.state.evict(self.moment, node_id, "alice", out))

    def submit(self, name: str = "job", **fields: Any) -> str:
        number = len(self.state.queue.runs) + 1
        run = Run(run_id=f"{name}-{number}", number=number, name=name, job={}, **fields)
        self.apply(lambda out: self.state.queue.submit(self.moment, run, out))
        return run.run_id

    def stop(self, run_id: str) -> None:
        self.apply(lambda out: self.state.queue.stop(self.moment, run_id, out))

    def resume(self, run_id: str) -> None:
        self.apply(lambda out: self.state.queue.resume(self.moment, run_id, out))

    def finish(self, run_id: str) -> None:
        line = Announce(kind="run.finished", run_id=run_id, text=f"{run_id} finished")
        self.apply(lambda out: self.state.queue.finish(self.moment, run_id, line, out))

    def wait(self, seconds: float, *, beating: tuple[str, ...] = (), step_s: float = 1.0) -> None:
        """Let time pass while the given nodes beat."""
        until = self.now_s + seconds
        while self.now_s < until:
            self.pass_time(min(until - self.now_s, step_s))
            for node_id in beating:
                worker = self.state.pulses[node_id].worker
                self.beat(node_id, worker=worker)

    def pass_time(self, seconds: float) -> None:
        """As the hub's ticker does: in steps of less than a second."""
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s = min(until, self.now_s + 0.9)
            self.apply(lambda out: self.state.tick(self.moment, out))

    def restart_hub(self, *, after_s: float = 0.0) -> None:
        """A new state machine from what was stored."""
        nodes = [msgspec.json.decode(msgspec.json.encode(node), type=Node) for node in self.state.nodes.values()]
        runs = [msgspec.json.decode(msgspec.json.encode(run), type=Run) for run in self.state.queue.runs.values()]
        self.now_s += after_s
        self.state = HubState(epoch=self.state.epoch, nodes=nodes, runs=runs, grace_s=self.grace_s)
        self.apply(lambda out: self.state.start(self.moment, out))

    # ---- questions ----

    def presence(self, node_id: str) -> str:
        return self.state.nodes[node_id].presence

    def run_of(self, node_id: str) -> str:
        return self.state.nodes[node_id].run_id

    def run(self, run_id: str) -> Run:
        return self.state.queue.runs[run_id]

    def members(self, run_id: str) -> list[str]:
        return [node.node_id for node in self.state.queue.members(run_id)]


def eventually(what: Callable[[], T | None], *, within_s: float = 10.0) -> T:
    """The first true value of `what`, which another thread brings about."""
    until = time.monotonic() + within_s
    while not (value := what()):
        if time.monotonic() > until:
            raise AssertionError(f"still {value!r} after {within_s} s")
        time.sleep(0.005)
    return value

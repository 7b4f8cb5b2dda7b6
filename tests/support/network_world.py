"""A whole network in one process with a hand-moved clock: the hub's machines, ledgers on real files, agents, workers.

The hub is the simulator's (`lab.sim_hub`): real state machine, run queue and ledgers, rebuilt from encoded rows and
files when it is killed. Each method of `Network` is one event; heartbeats travel as messages that a test may copy,
delay and reorder.
"""

import contextlib
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ciuic.errors import CertificateError, ConflictError, SupersededError
from ciuic.hub.membership.state import Desired
from ciuic.job import parse_job
from ciuic.lab.sim_hub import SimHub
from ciuic.lab.sim_model import Common, Extra
from ciuic.net.messages import AttachRequest, DetachRequest, HeartbeatRequest, LeaseRequest, WorkerReport

GRACE_S = 10.0
STEP_S = 0.25
"""Of time that passes: as often as the hub ticks."""
SAMPLES = 200
JOB_GRACE = ("3 s", "10 s")


@dataclass(kw_only=True, eq=False)
class Worker:
    """A worker process; `alive` until it ends or is killed."""

    key: tuple[str, int]
    incarnation: int = 0
    model: Extra | None = None
    todo: list[tuple[int, int]] = field(default_factory=list)
    request_id: int = 0
    is_finished: bool = False


@dataclass(kw_only=True, eq=False)
class Agent:
    """An agent process. `is_stopped`: SIGSTOP; `is_refused`: the hub sent it home."""

    node: str
    incarnation: str
    sequence: int = 0
    revision: int = 0
    beat_every_s: float = 2.0
    beaten_s: float = float("-inf")
    is_alive: bool = True
    is_stopped: bool = False
    is_draining: bool = False
    is_refused: bool = False
    worker: Worker | None = None
    report: WorkerReport = field(default_factory=WorkerReport)
    settled: tuple[str, int] | None = None


class Network:
    """The system under test and everybody who speaks to it."""

    def __init__(self) -> None:
        root = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.folder = Path(tempfile.mkdtemp(dir=root))
        self.now_s = 1000.0
        self.hub = SimHub(self.folder, clock=lambda: self.now_s, grace_s=GRACE_S)
        self.agents: dict[str, list[Agent]] = {}
        """By node: the living ones, oldest first."""
        self.cut: set[str] = set()
        self.evicted: set[str] = set()
        self.wire: list[tuple[Agent, HeartbeatRequest]] = []
        """Heartbeats on their way, and copies of delivered ones."""
        self.commons: dict[str, Common] = {}
        self.born = 0

    def close(self) -> None:
        self.hub.kill()
        shutil.rmtree(self.folder)

    # ---- nodes

    def join(self, place: str) -> str:
        node = place if place not in self.agents else f"{place}-{len(self.agents) + 1}"
        self.agents[node] = []
        self.hub.enrol(node, place)
        self.start_agent(node)
        return node

    def start_agent(self, node: str) -> Agent:
        """A new agent process; an earlier one goes on until it hears that it is fenced."""
        self.born += 1
        agent = Agent(node=node, incarnation=f"i{self.born}")
        self.agents[node].append(agent)
        self.beat(agent)
        return agent

    def newest(self, node: str) -> Agent | None:
        living = [agent for agent in self.agents[node] if agent.is_alive]
        return living[-1] if living else None

    def kill(self, agent: Agent) -> None:
        """kill -9 of agent and worker."""
        agent.is_alive, agent.worker = False, None
        self.agents[agent.node].remove(agent)

    def is_well(self, agent: Agent) -> bool:
        """It can speak, and the hub listens to it."""
        can = agent.is_alive and not agent.is_stopped and agent.node not in self.cut
        return can and agent is self.newest(agent.node) and agent.node not in self.evicted

    def compose(self, agent: Agent) -> HeartbeatRequest:
        agent.sequence += 1
        return HeartbeatRequest(
            agent_incarnation=agent.incarnation,
            sequence=agent.sequence,
            known_revision=agent.revision,
            location=agent.node.partition("-")[0],
            worker=agent.report,
            draining=agent.is_draining,
        )

    def beat(self, agent: Agent) -> None:
        """A heartbeat, and its answer, when nothing is in the way."""
        if agent.is_alive and not agent.is_stopped and agent.node not in self.cut:
            agent.beaten_s = self.now_s
            self.deliver(agent, self.compose(agent))

    def deliver(self, agent: Agent, request: HeartbeatRequest) -> None:
        """A heartbeat reaches the hub, maybe late or for the second time."""
        state = self.hub.state
        try:
            self.hub.change(lambda now, out: state.beat(now, agent.node, request, out))
            desired = state.desired(agent.node, request.agent_incarnation)
        except (CertificateError, SupersededError):
            agent.is_refused = True
            if agent.is_alive and agent.node not in self.cut and not agent.is_stopped:
                self.kill(agent)
            return
        assert agent.node not in self.evicted, "an evicted node was listened to"
        assert not agent.is_refused, "a process that was sent home was listened to"
        if request.sequence == agent.sequence and agent.is_alive and not agent.is_stopped:
            self.obey(agent, desired)

    def obey(self, agent: Agent, desired: Desired) -> None:
        """What the agent does with the hub's wish."""
        agent.revision, agent.beat_every_s = desired.revision, desired.heartbeat_s
        run = desired.run
        wanted = None if run is None or desired.stop_worker or agent.is_draining else (run.run_id, run.attempt)
        if agent.worker is not None and agent.worker.key != wanted:
            self.detach(agent, "stopped")
            self.ended(agent, "stopped")
        elif agent.worker is None:
            if run is None:
                agent.report, agent.settled = WorkerReport(), None
            if wanted is not None and wanted != agent.settled:
                agent.worker = Worker(key=wanted)
                agent.report = WorkerReport(run_id=wanted[0], attempt=wanted[1], state="running")

    def ended(self, agent: Agent, state: str) -> None:
        """The worker has ended; the agent says so with its next beat."""
        worker = agent.worker
        if worker is not None:
            agent.worker = None
            agent.settled = None if state == "stopped" else worker.key
            agent.report = WorkerReport(run_id=worker.key[0], attempt=worker.key[1], state=state, detail="it says so")

    def leave(self, agent: Agent) -> None:
        state = self.hub.state
        try:
            self.hub.change(lambda now, out: state.leave(now, agent.node, agent.incarnation, out))
        except (CertificateError, SupersededError):
            assert agent.node in self.evicted or agent is not self.newest(agent.node)
        agent.is_refused = True
        self.kill(agent)

    def evict(self, node: str) -> None:
        state = self.hub.state
        self.hub.change(lambda now, out: state.evict(now, node, "alice", out))
        self.evicted.add(node)

    # ---- runs

    def submit(self, low: int, high: int | None, grace: str, place: str) -> str:
        nodes = {"min": low, **({"max": high} if high else {}), **({"locations": [place]} if place else {})}
        job = {"name": "job", "nodes": nodes, "fault": {"grace": grace}, "train": {"samples": SAMPLES}}
        run_id = self.hub.submit(parse_job({**job, "sync": {"compression": "int8", "interval": 2, "deadline": 4.0}}))
        self.commons[run_id] = Common(run_id, 0)
        return run_id

    def stop_run(self, run_id: str) -> None:
        queue = self.hub.state.queue
        try:
            self.hub.change(lambda now, out: queue.stop(now, run_id, out))
        except ConflictError:
            assert queue.get(run_id).state in ("finished", "failed")

    def resume_run(self, run_id: str) -> None:
        queue = self.hub.state.queue
        try:
            self.hub.change(lambda now, out: queue.resume(now, run_id, out))
        except ConflictError:
            assert queue.get(run_id).state not in ("stopped", "failed")

    # ---- workers

    def work(self, agent: Agent) -> None:
        """One turn of the worker: take a place, lease, train, push, pull."""
        worker = agent.worker
        if worker is None or not self.is_well(agent):
            return
        try:
            if worker.model is None:
                self._attach(agent, worker)
            elif not worker.is_finished:
                self._train(agent, worker)
        except SupersededError:
            self.ended(agent, "stopped")
        except ConflictError:
            worker.model = None  # taken out of the run, or said goodbye: ask for a place again
        if worker.is_finished and agent.worker is worker:
            self.detach(agent, "finished")
            self.ended(agent, "finished")

    def _attach(self, agent: Agent, worker: Worker) -> None:
        run_id, _ = worker.key
        common = self.commons[run_id]
        self.hub.check_assigned(run_id, agent.node)
        ledger = self.hub.ledger(run_id)
        request = AttachRequest(layout=msgspec.to_builtins(common.layout))
        reply = ledger.attach(agent.node, request)
        if reply.state == "initialize":
            ledger.put_snapshot(agent.node, 0, common.version_0())
            reply = ledger.attach(agent.node, request)
        if reply.state == "ready":
            worker.incarnation, worker.request_id, worker.todo = reply.incarnation, 0, []
            self._follow(run_id)
            worker.model = Extra(common, agent.node, reply.incarnation, reply.fragments[0].version)
            worker.model.codec = reply.pace.codec_up

    def _follow(self, run_id: str) -> None:
        """All entries so far, decoded; each must be what it was before."""
        common, ledger = self.commons[run_id], self.hub.ledger(run_id)
        version = ledger.fragments[0].version
        assert version >= len(common.entries), "versions went back"
        if version > len(common.entries):
            common.take(len(common.entries), ledger.entries_after(0, len(common.entries), 1 << 30))

    def _train(self, agent: Agent, worker: Worker) -> None:
        run_id, model = worker.key[0], worker.model
        ledger = self.hub.ledger(run_id)
        self._follow(run_id)
        model.merge_up_to(len(self.commons[run_id].entries))
        if not worker.todo and not model.tokens:
            worker.request_id += 1
            request = LeaseRequest(
                incarnation=worker.incarnation, count=4, request_id=worker.request_id, unpushed=model.has_flight
            )
            reply = ledger.lease(agent.node, request)
            worker.todo = [(a, b) for a, b in reply.ranges]
            worker.is_finished = reply.status == "finished"
        elif worker.todo:
            model.stepped(1, [worker.todo.pop()])
        if model.tokens and not model.has_flight:
            reply = ledger.push(agent.node, model.push())
            if reply.status == "rejected":
                model.rejected(model.sequence)

    def detach(self, agent: Agent, reason: str) -> None:
        worker = agent.worker
        if worker is None or worker.model is None or agent.node in self.cut:
            return
        with contextlib.suppress(ConflictError, SupersededError):
            request = DetachRequest(incarnation=worker.incarnation, reason=reason)
            self.hub.ledger(worker.key[0]).detach(agent.node, request)

    # ---- time

    def pass_time(self, seconds: float, *, working: bool = False) -> None:
        """The hub ticks; whoever can beats in time (and works)."""
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s = min(until, self.now_s + STEP_S)
            self.hub.tick()
            for agents in list(self.agents.values()):
                for agent in list(agents):
                    if self.now_s - agent.beaten_s >= agent.beat_every_s:
                        self.beat(agent)
                    if working and agent.is_alive:
                        self.work(agent)

    def pause_hub(self, seconds: float, *, tick_first: bool) -> None:
        """The hub's process stands still; what was sent meanwhile comes when it goes on."""
        waiting = [
            (agent, self.compose(agent)) for node in self.agents for agent in self.agents[node] if self._can(agent)
        ]
        self.now_s += seconds
        if tick_first:
            self.hub.tick()
        for agent, request in waiting:
            agent.beaten_s = self.now_s
            self.deliver(agent, request)

    def _can(self, agent: Agent) -> bool:
        return agent.is_alive and not agent.is_stopped and agent.node not in self.cut

    def restart_hub(self, outage_s: float) -> None:
        """kill -9; the agents cannot reach it for so long, then find it again within a few seconds."""
        self.hub.kill()
        self.now_s += outage_s
        self.hub.restart()
        for agents in self.agents.values():
            for agent in agents:
                agent.beaten_s = self.now_s - agent.beat_every_s + 3.0

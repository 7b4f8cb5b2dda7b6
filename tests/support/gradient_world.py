"""One hub and a few nodes in `gradient` mode in one process: lost answers, deaths, kills of the hub. Real files."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from ledger_world import small_layout

from ciuic.codec import NumpyVectors
from ciuic.errors import SupersededError
from ciuic.hub.run.rounds import RunLedger
from ciuic.job import parse_job
from ciuic.ledger.entry import Snapshot, SnapshotHeader, base_digest, entry_from_frame, snapshot_from_frame
from ciuic.ledger.gradient import GradientReplica
from ciuic.ledger.layout import StepRule, make_layout
from ciuic.ledger.node import NodeMachine, Place
from ciuic.net import messages as m

RUN = "r1"


@dataclass(kw_only=True)
class Worker:
    """One incarnation of a node: it trains only while nothing of it is in flight."""

    name: str
    machine: NodeMachine
    thetas: list[np.ndarray]
    todo: list[int] = field(default_factory=list)
    request_id: int = 0
    is_dead: bool = False
    is_finished: bool = False

    @property
    def replicas(self) -> list[GradientReplica]:
        return [replica for replica in self.machine.replicas if isinstance(replica, GradientReplica)]

    @property
    def is_busy(self) -> bool:
        return any(replica.in_flight is not None or replica.progress.tokens for replica in self.replicas)

    def train_dropped_again(self) -> None:
        for replica in self.replicas:
            for start, stop in replica.dropped:
                self.todo[:0] = range(start, stop)
            replica.dropped = []


@dataclass(frozen=True, kw_only=True)
class Sent:
    worker: Worker
    fragment: int
    sequence: int
    frame: bytes


class GradientWorld:
    """The system under test; `play` is a random schedule, `finish` brings the run to its end."""

    def __init__(self, folder: Path, *, seed: int, fragments: int, frozen: bool, samples: int = 40) -> None:
        self.folder, self.now = folder, 100.0
        self.choice, self.values = random.Random(seed), np.random.default_rng(seed)
        plain = small_layout(fragments)
        rule = StepRule(beta1=0.9, beta2=0.99, eps=1e-8, feedback=frozen, freeze_at=0.3 if frozen else 1.0)
        self.layout = make_layout(plain.tensors, fragments, rule)
        sync = {"send": "gradient", "fragments": fragments, "deadline": 5.0, "max_staleness": 1, "min_fraction": 0.5}
        optim = {"optimizer": "1-bit-adam" if frozen else "adamw"}
        self.job = parse_job({"train": {"samples": samples}, "sync": sync, "optim": optim})
        self.hub = self._open()
        self.base_0 = [self.values.normal(size=self.count(f)).astype(np.float32) for f in range(fragments)]
        self.network: list[Sent] = []
        self.digests: dict[tuple[int, int], str] = {}
        self.workers: dict[str, Worker] = {}
        for name in ("a", "b", "c"):
            self.start(name)

    def _open(self) -> RunLedger:
        return RunLedger.open(
            self.folder, self.job, run_id=RUN, clock=lambda: self.now, emit=lambda *_: None, wake=lambda: None
        )

    def count(self, fragment: int) -> int:
        return self.layout.fragment_shape(fragment).element_count

    # ---- events

    def start(self, name: str) -> None:
        """A (new) process of a node takes its place."""
        if name in self.workers:
            self.workers[name].is_dead = True
        request = m.AttachRequest(layout=msgspec.to_builtins(self.layout))
        reply = self.hub.attach(name, request)
        if reply.state == "initialize":
            for fragment, base in enumerate(self.base_0):
                self.hub.put_snapshot(name, fragment, self._version_0(fragment, base))
            reply = self.hub.attach(name, request)
        assert reply.pace is not None
        place = Place(run=RUN, node=name, incarnation=reply.incarnation)
        machine = NodeMachine(self.layout, NumpyVectors(), reply.pace.codec_up, place)
        machine.lr = 0.01
        worker = self.workers[name] = Worker(name=name, machine=machine, thetas=[])
        for fragment, state in enumerate(reply.fragments):
            frame = self.hub.snapshot_path(fragment, state.snapshot_version).read_bytes()
            worker.thetas.append(machine.load_snapshot(fragment, snapshot_from_frame(frame, self.count(fragment))))
        self.pull(worker)

    def _version_0(self, fragment: int, base: np.ndarray) -> bytes:
        counters = (0,) if fragment == 0 else ()
        header = SnapshotHeader(
            run=RUN,
            fragment=fragment,
            version=0,
            layout_digest=self.layout.digest,
            digest=base_digest(base, counters),
            parts=("base",),
            counters=counters,
        )
        return Snapshot(header=header, vectors={"base": base}).to_frame()

    def lease(self, worker: Worker) -> None:
        request = m.LeaseRequest(
            incarnation=worker.machine.place.incarnation,
            count=4,
            request_id=worker.request_id + 1,
            unpushed=bool(worker.todo) or worker.is_busy,
        )
        reply = self.hub.lease(worker.name, request)
        if reply.status == "granted":
            worker.request_id += 1
            for start, stop in reply.ranges:
                worker.todo += range(start, stop)
        worker.is_finished = reply.status == "finished"

    def step(self, worker: Worker) -> None:
        """The gradient of one sample, in all fragments; fragment 0, which reports it, last."""
        if not worker.todo or any(replica.in_flight is not None for replica in worker.replicas):
            return
        sample = worker.todo.pop(0)
        worker.machine.stepped(3, [(sample, sample + 1)])
        for fragment in reversed(range(self.layout.fragment_count)):
            gradient = self.values.normal(size=self.count(fragment)).astype(np.float32)
            push = worker.machine.push(fragment, gradient, (1,) if fragment == 0 else ())
            sequence = push.header.sequence
            self.network.append(Sent(worker=worker, fragment=fragment, sequence=sequence, frame=push.to_frame()))

    def deliver(self, index: int, *, loses_answer: bool) -> None:
        if not self.network:
            return
        sent = self.network[index % len(self.network)]
        if not loses_answer:
            self.network.remove(sent)
        try:
            reply = self.hub.push(sent.worker.name, sent.frame)
        except SupersededError:
            assert sent.worker.is_dead
            if sent in self.network:
                self.network.remove(sent)
            return
        if reply.status == "rejected" and not loses_answer and not sent.worker.is_dead:
            sent.worker.machine.rejected(sent.fragment, sent.sequence)
            sent.worker.train_dropped_again()

    def pull(self, worker: Worker) -> None:
        for fragment, theta in enumerate(worker.thetas):
            replica = worker.replicas[fragment]
            for frame in self.hub.entries_after(fragment, replica.version, 1 << 30):
                worker.machine.merge(entry_from_frame(frame), theta)
                known = self.digests.setdefault((fragment, replica.version), replica.digest)
                assert known == replica.digest, "bases differ at equal versions"
                assert np.array_equal(theta, replica.base), "theta is not the base"
        worker.train_dropped_again()

    def kill_hub(self) -> None:
        """kill -9: only the files remain, and every bit of the state comes back from them."""
        before, committed = self.state(), list(self.hub.samples.committed)
        self.hub.close()
        self.hub = self._open()
        assert self.state() == before
        assert list(self.hub.samples.committed) == committed

    def state(self) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for fragment in self.hub.fragments:
            aggregator = fragment.aggregator
            assert aggregator.moments is not None
            vectors = (aggregator.base, aggregator.residual, aggregator.moments.first, aggregator.moments.second)
            found.append((aggregator.version, aggregator.phase, *(v.tobytes() for v in vectors)))
        return found

    def play(self, events: int) -> None:
        for _ in range(events):
            worker = self.workers[self.choice.choice("abc")]
            luck = self.choice.random()
            if luck < 0.2:
                self.lease(worker)
            elif luck < 0.45:
                self.step(worker)
            elif luck < 0.7:
                self.deliver(self.choice.randrange(9), loses_answer=self.choice.random() < 0.2)
            elif luck < 0.9:
                self.pull(worker)
            elif luck < 0.93:
                self.start(worker.name)
            elif luck < 0.95:
                self.hub.node_gone(worker.name)
            elif luck < 0.965:
                self.kill_hub()
            else:
                self.now += self.choice.random() * 6
                self.hub.tick()
            assert self.hub.info(full=False)["samples"].lost == 0

    def finish(self) -> None:
        for _ in range(4000):
            for worker in self.workers.values():
                self.lease(worker)
                self.step(worker)
                self.pull(worker)
            self.deliver(0, loses_answer=False)
            self.deliver(0, loses_answer=False)
            self.now += 3
            self.hub.tick()
            if all(worker.is_finished for worker in self.workers.values()) and not self.network:
                break
        else:
            raise AssertionError("the run does not come to its end")
        for worker in self.workers.values():
            self.pull(worker)
            for replica, fragment in zip(worker.replicas, self.hub.fragments, strict=True):
                assert replica.digest == fragment.aggregator.digest
        assert self.hub.samples.complete
        self.kill_hub()

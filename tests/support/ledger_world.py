"""One hub and a few nodes in one process, with a network that delays, drops, doubles and reorders. Real files.

Every vector has a float64 shadow, so that the invariants of the protocol can be checked after any schedule.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ciuic.codec import FragmentCodec, NumpyVectors
from ciuic.errors import ConflictError, SupersededError
from ciuic.hub.run.rounds import RunLedger
from ciuic.job import parse_job
from ciuic.ledger.entry import Push, Snapshot, SnapshotHeader, base_digest, entry_from_frame, snapshot_from_frame
from ciuic.ledger.layout import Layout, Tensor, make_layout
from ciuic.ledger.node import NodeMachine, Place
from ciuic.ledger.replica import InFlight
from ciuic.ledger.settings import Settings
from ciuic.net import messages as m

RUN = "r1"
TOLERANCE = 2e-4


def small_layout(fragment_count: int) -> Layout:
    """A few tensors per fragment: row-aligned, plain, small, and a buffer."""
    tensors: list[Tensor] = []
    for f in range(fragment_count):
        tensors += [
            Tensor(name=f"f{f}.embed", shape=(5, 7), dtype="float32", section="coded", row_aligned=True, fragment=f),
            Tensor(name=f"f{f}.matrix", shape=(9, 5), dtype="float32", section="coded", fragment=f),
            Tensor(name=f"f{f}.norm", shape=(3,), dtype="float32", section="small", fragment=f),
            Tensor(name=f"f{f}.bias", shape=(2,), dtype="float32", section="buffer", trainable=False, fragment=f),
        ]
    tensors.append(Tensor(name="batches", shape=(), dtype="int64", section="counter", trainable=False))
    return make_layout(tensors, fragment_count)


@dataclass(kw_only=True)
class Worker:
    """One incarnation of a node."""

    name: str
    machine: NodeMachine
    theta: list[np.ndarray]
    todo: list[int] = field(default_factory=list)
    request_id: int = 0
    unpushed: list[np.ndarray] = field(default_factory=list)
    """Shadow: minus the step movements since the last push, per fragment (float64)."""
    flight: list[np.ndarray | None] = field(default_factory=list)
    sum_d: list[np.ndarray] = field(default_factory=list)
    sum_q: list[np.ndarray] = field(default_factory=list)
    dead: bool = False
    finished: bool = False


@dataclass(kw_only=True)
class Message:
    worker: Worker
    fragment: int
    sequence: int
    frame: bytes


class World:
    """The system under test; each method is one event."""

    def __init__(self, folder: Path, *, nodes: int, fragments: int, codec: str, total: int, max_staleness: int) -> None:
        self.folder, self.now = folder, 100.0
        self.layout = self.make_layout(fragments)
        self.job = parse_job(
            {
                "train": {"samples": total},
                "nodes": {"min": 1},
                "sync": {"compression": codec, "deadline": 5.0, "max_staleness": max_staleness, "min_fraction": 0.5},
            }
        )
        self.codecs = (self.job.sync.codec_up, self.job.sync.codec_down)
        self.events: list[tuple[str, str]] = []
        self.network: list[Message] = []
        self.workers: dict[str, Worker] = {}
        self.all_workers: list[Worker] = []
        self.random = np.random.default_rng(0)
        self.hub = self._open()
        self.base_0 = [self.random.normal(size=self._count(f)).astype(np.float32) for f in range(fragments)]
        self.digests: dict[tuple[int, int], str] = {}
        self.lossy_departures = False
        self.sent: dict[tuple[int, str, int, int], Message] = {}
        self.decoded: dict[tuple[int, str, int, int], np.ndarray] = {}
        for i in range(nodes):
            self.start(f"n{i}")

    def make_layout(self, fragments: int) -> Layout:
        return small_layout(fragments)

    def _count(self, fragment: int) -> int:
        return self.layout.fragment_shape(fragment).element_count

    def _open(self) -> RunLedger:
        return RunLedger.open(
            self.folder,
            self.job,
            run_id=RUN,
            clock=lambda: self.now,
            emit=lambda kind, text, node, data: self.events.append((kind, text)),
            wake=lambda: None,
        )

    # ---- events

    def start(self, name: str) -> None:
        """A (new) worker process of a node attaches and loads the newest snapshot and the entries since."""
        old = self.workers.get(name)
        if old is not None:
            old.dead = True
        request = m.AttachRequest(layout=_dict(self.layout), dataset_samples=0)
        reply = self.hub.attach(name, request)
        if reply.state == "initialize":
            for f, base in enumerate(self.base_0):
                self.hub.put_snapshot(name, f, self._version_0(f, base))
            reply = self.hub.attach(name, request)
        assert reply.state == "ready"
        machine = NodeMachine(
            self.layout, NumpyVectors(), self.codecs[0], Place(run=RUN, node=name, incarnation=reply.incarnation)
        )
        machine.use(reply.pace.codec_up)
        worker = Worker(name=name, machine=machine, theta=[])
        for f, state in enumerate(reply.fragments):
            frame = self.hub.snapshot_path(f, state.snapshot_version).read_bytes()
            snapshot = snapshot_from_frame(frame, self._count(f))
            worker.theta.append(
                machine.load(f, snapshot.vectors["base"], state.snapshot_version, snapshot.header.counters)
            )
            for group in (worker.unpushed, worker.sum_d, worker.sum_q):
                group.append(np.zeros(self._count(f)))
            worker.flight.append(None)
        self.workers[name] = worker
        self.all_workers.append(worker)
        for f in range(self.layout.fragment_count):
            self.pull(name, f, 1000)

    def _version_0(self, fragment: int, base: np.ndarray) -> bytes:
        counters = (0,) if fragment == 0 else ()
        header = SnapshotHeader(
            run=RUN, fragment=fragment, version=0, layout_digest=self.layout.digest,
            digest=base_digest(base, counters), parts=("base",), counters=counters,
        )  # fmt: skip
        return Snapshot(header=header, vectors={"base": base}).to_frame()

    def lease(self, name: str, count: int) -> None:
        worker = self.workers[name]
        replicas = worker.machine.replicas
        request = m.LeaseRequest(
            incarnation=worker.machine.place.incarnation,
            count=count,
            request_id=worker.request_id + 1,
            unpushed=bool(worker.todo) or any(r.in_flight is not None or r.progress.tokens for r in replicas),
        )
        first = self.hub.lease(name, request)
        if first.status == "granted":
            assert self.hub.lease(name, request) == first, "the same request must get the same samples"
            worker.request_id += 1
            for start, stop in first.ranges:
                worker.todo.extend(range(start, stop))
        worker.finished = first.status == "finished"

    def step(self, name: str) -> None:
        worker = self.workers[name]
        if not worker.todo:
            return
        sample = worker.todo.pop(0)
        for f, theta in enumerate(worker.theta):
            before = theta.astype(np.float64)
            move = self.random.normal(size=len(theta)).astype(np.float32) * np.float32(0.1)
            move[: 7 * (sample % 5)] = 0  # some embedding rows are not touched
            theta += move
            worker.unpushed[f] += before - theta
        worker.machine.stepped(3, [(sample, sample + 1)])

    def push(self, name: str, fragment: int) -> None:
        worker = self.workers[name]
        machine = worker.machine
        if not machine.can_push(fragment, 1):
            return
        counters = (machine.place.incarnation + worker.request_id,) if fragment == 0 else ()
        push = machine.push(fragment, worker.theta[fragment], counters)
        codec = FragmentCodec(push.header.codec, self.layout.fragment_shape(fragment))
        assert len(push.payload) == codec.payload_bytes
        worker.flight[fragment] = worker.unpushed[fragment]
        worker.unpushed[fragment] = np.zeros_like(worker.unpushed[fragment])
        worker.sum_d[fragment] += worker.flight[fragment]
        worker.sum_q[fragment] += codec.decode(push.payload)
        message = Message(worker=worker, fragment=fragment, sequence=push.header.sequence, frame=push.to_frame())
        self.sent[fragment, *push.key] = message
        self.decoded[fragment, *push.key] = codec.decode(push.payload)
        self.network.append(message)

    def deliver(self, index: int, *, keep: bool, lose_reply: bool) -> None:
        """A frame arrives; it may stay on the way (a duplicate later), and its reply may be lost (the node resends)."""
        if not self.network:
            return
        message = self.network[index % len(self.network)]
        worker = message.worker
        if not keep and not lose_reply:
            self.network.remove(message)
        try:
            reply = self.hub.push(worker.name, message.frame)
        except SupersededError:
            assert worker.dead
            if message in self.network:
                self.network.remove(message)
            return
        assert not worker.dead, "a superseded process was listened to"
        if not lose_reply:
            worker.machine.use(reply.pace.codec_up)
        if reply.status == "rejected" and not lose_reply and not worker.dead:
            self._rejected(worker, message.fragment, message.sequence)

    def _rejected(self, worker: Worker, fragment: int, sequence: int) -> None:
        flight = worker.machine.replicas[fragment].in_flight
        if flight is None or flight.sequence != sequence:
            return
        self._shadow_reject(worker, fragment, flight)
        worker.machine.rejected(fragment, sequence)

    def _shadow_reject(self, worker: Worker, fragment: int, flight: InFlight) -> None:
        shadow = worker.flight[fragment]
        assert shadow is not None
        codec = FragmentCodec(flight.codec, self.layout.fragment_shape(fragment))
        worker.sum_d[fragment] -= shadow
        worker.sum_q[fragment] -= codec.decode(flight.payload)
        worker.unpushed[fragment] += shadow
        worker.flight[fragment] = None

    def pull(self, name: str, fragment: int, limit: int) -> None:
        """The next entries arrive at a node, up to `limit`."""
        worker = self.workers[name]
        replica = worker.machine.replicas[fragment]
        for frame in self.hub.entries_after(fragment, replica.version, 1 << 30)[:limit]:
            entry = entry_from_frame(frame)
            flight = replica.in_flight
            place = worker.machine.place
            outcome = entry.outcome(place.node, place.incarnation, flight.sequence) if flight else "absent"
            if flight is not None and outcome == "rejected":
                self._shadow_reject(worker, fragment, flight)
            worker.machine.merge(entry, worker.theta[fragment])
            if outcome == "merged":
                worker.flight[fragment] = None

    def crash_hub(self) -> None:
        """kill -9: only the files remain."""
        before = [(f.aggregator.version, f.aggregator.digest, f.aggregator.residual.copy()) for f in self.hub.fragments]
        committed = list(self.hub.samples.committed)
        self.hub.close()
        self.hub = self._open()
        after = [(f.aggregator.version, f.aggregator.digest) for f in self.hub.fragments]
        assert after == [(v, d) for v, d, _ in before]
        for fragment, (_, _, residual) in zip(self.hub.fragments, before, strict=True):
            assert np.array_equal(fragment.aggregator.residual, residual)
        assert list(self.hub.samples.committed) == committed

    def switch(self, policy: str, codec_up: str, codec_down: str) -> None:
        """Other settings hold from here on; nodes learn of them with their next answer."""
        self.hub.switch(Settings(policy=policy, codec_up=codec_up, codec_down=codec_down, why="test"))

    def forget(self, name: str) -> None:
        """The hub thinks a node is dead (it may speak again)."""
        if self.hub.samples.outstanding(name) and not self.workers[name].dead:
            self.lossy_departures = True
        self.hub.node_gone(name)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.hub.tick()

    # ---- what must hold

    def check(self) -> None:
        self._check_hub()
        for worker in self.workers.values():
            for f in range(self.layout.fragment_count):
                self._check_worker(worker, f)

    def _check_worker(self, worker: Worker, f: int) -> None:
        replica, theta = worker.machine.replicas[f], worker.theta[f]
        if (f, replica.version) in self.digests:
            assert replica.digest == self.digests[f, replica.version], "bases differ at equal versions"
        error = worker.sum_d[f] - worker.sum_q[f] - replica.e
        assert np.abs(error).max() < TOLERANCE, "sum d - sum q is not the residual"
        pushed = worker.flight[f] if worker.flight[f] is not None else 0.0
        progress = replica.base.astype(np.float64) - theta
        assert np.abs(progress - worker.unpushed[f] - pushed).max() < TOLERANCE, "progress is lost or counted twice"

    def _check_hub(self) -> None:
        counts = self.hub.info(full=False)["samples"]
        assert counts.lost == 0, "samples are nowhere"
        for f, fragment in enumerate(self.hub.fragments):
            aggregator, store = fragment.aggregator, fragment.store
            shape = self.layout.fragment_shape(f)
            keys: list[tuple[str, int, int]] = []
            applied = np.zeros(shape.element_count)
            for version in range(1, store.version + 1):
                entry = store.entry(version)
                applied += FragmentCodec(entry.header.codec, shape).decode(entry.payload)
                keys += [(c.node, c.incarnation, c.sequence) for c in entry.header.contributors]
                assert self.digests.setdefault((f, version), entry.header.digest) == entry.header.digest
            assert len(keys) == len(set(keys)), "a push merged twice"
            assert np.abs(self.base_0[f] - applied - aggregator.base).max() < TOLERANCE
            assert np.isfinite(aggregator.base).all()
            assert np.isfinite(aggregator.residual).all()

    def check_hub_residual(self) -> None:
        """Hub: sum u - sum entries = e_s, with u recomputed here from what the nodes pushed."""
        for f, fragment in enumerate(self.hub.fragments):
            shape = self.layout.fragment_shape(f)
            difference = np.zeros(shape.element_count)
            for version in range(1, fragment.store.version + 1):
                entry = fragment.store.entry(version)
                for c in entry.header.contributors:
                    difference += c.weight * self.decoded[f, c.node, c.incarnation, c.sequence]
                difference -= FragmentCodec(entry.header.codec, shape).decode(entry.payload)
            assert np.abs(difference - fragment.aggregator.residual).max() < TOLERANCE, "the hub's residual is wrong"

    def resend_everything(self) -> None:
        """Replays of all pushes ever made change nothing."""
        before = [(f.aggregator.version, len(f.inbox.waiting)) for f in self.hub.fragments]
        for message in self.sent.values():
            try:
                reply = self.hub.push(message.worker.name, message.frame)
            except SupersededError:
                assert message.worker.dead
            else:
                assert reply.status in ("duplicate", "rejected")
        assert before == [(f.aggregator.version, len(f.inbox.waiting)) for f in self.hub.fragments]

    def whole_round(self, names: set[str]) -> None:
        """These nodes train, push and are heard; then the deadline passes and everybody pulls."""
        for name in sorted(names):
            self.lease(name, 1)
            self.step(name)
            for f in range(self.layout.fragment_count):
                self.push(name, f)
        for message in [x for x in self.network if x.worker.name in names]:
            self.deliver(self.network.index(message), keep=False, lose_reply=False)
        self.tick(6.0)
        for name in self.workers:
            for f in range(self.layout.fragment_count):
                self.pull(name, f, 1000)

    def drain(self) -> None:
        """Everything that is on the way arrives; all nodes train to the end."""
        for _ in range(400):
            while self.network:
                self.deliver(0, keep=False, lose_reply=False)
            for name in self.workers:
                for f in range(self.layout.fragment_count):
                    self.pull(name, f, 1000)
                self.lease(name, 3)
                self.step(name)
                for f in reversed(range(self.layout.fragment_count)):
                    self.push(name, f)
            self.tick(2.0)
            if all(w.finished for w in self.workers.values()) and not self.network:
                return
        raise AssertionError("the run does not come to its end")

    def corrupted(self, name: str, bit: int) -> bytes | None:
        """A push of this node with one bit flipped, if one is on the way."""
        for message in self.network:
            if message.worker.name == name:
                data = bytearray(message.frame)
                data[(bit // 8) % len(data)] ^= 1 << (bit % 8)
                return bytes(data)
        return None


def _dict(layout: Layout) -> dict:
    import msgspec

    return msgspec.to_builtins(layout)


__all__ = ["ConflictError", "Message", "Push", "Worker", "World", "small_layout"]

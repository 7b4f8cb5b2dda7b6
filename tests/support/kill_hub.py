"""A hub in a process of its own that is killed at a write point, and two nodes that ask again until it is back."""

import contextlib
import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from kill_points import ended, fork
from ledger_world import RUN, small_layout

from ciuic.codec import NumpyVectors
from ciuic.errors import CiuicError, ConflictError
from ciuic.hub.run.rounds import RunLedger
from ciuic.job import Job, parse_job
from ciuic.ledger.entry import Snapshot, SnapshotHeader, base_digest, entry_from_frame, snapshot_from_frame
from ciuic.ledger.frame import split_frames
from ciuic.ledger.node import NodeMachine, Place
from ciuic.ledger.store import FragmentStore, settled_keys
from ciuic.net import messages as m

FRAGMENTS = 2
TOTAL = 12
STRIDE = int(os.environ.get("CIUIC_KILL_EVERY", "3"))
"""Of so many write points one is tried, before and half-way through writes in turn; 1: all."""
LAYOUT = small_layout(FRAGMENTS)


def job() -> Job:
    sync = {"compression": "int8", "deadline": 5.0, "max_staleness": 1, "outer_momentum": 0.5, "outer_lr": 0.7}
    return parse_job({"train": {"samples": TOTAL}, "nodes": {"min": 2}, "sync": sync})


def open_ledger(folder: Path) -> RunLedger:
    return RunLedger.open(folder, job(), run_id=RUN, clock=lambda: 0.0, emit=lambda *_: None, wake=lambda: None)


class Hub:
    """Calls go to the process; when it is killed inside one, a new one is started and asked again."""

    def __init__(self, folder: Path, bombs: list[int]) -> None:
        self.folder, self.bombs = folder, bombs
        self.kills = 0
        self._start()

    def _start(self) -> None:
        self._pid, self._line = fork(self._serve, bomb=self.bombs.pop(0) if self.bombs else 0)

    def _serve(self, line: Connection) -> None:
        ledger = open_ledger(self.folder)
        while True:
            name, args = line.recv()
            if name == "end":
                ledger.close()
                return
            try:
                result = getattr(ledger, name)(*args)
            except CiuicError as error:
                result = error
            line.send(result)

    def call(self, name: str, *args: Any) -> Any:
        """Raises what the hub raised."""
        while True:
            try:
                self._line.send((name, args))
                result = self._line.recv()
            except (EOFError, BrokenPipeError, ConnectionResetError):
                status = ended(self._pid)
                assert status == -9, f"the hub ended by itself with {status}"
                self.kills += 1
                self._start()
                continue
            if isinstance(result, CiuicError):
                raise result
            return result

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._line.send(("end", ()))
        ended(self._pid)


@dataclass(kw_only=True)
class Node:
    """A worker that is never killed."""

    name: str
    hub: Hub
    machine: NodeMachine | None = None
    theta: list[np.ndarray] = field(default_factory=list)
    request_id: int = 0
    todo: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    finished: bool = False

    def attach(self) -> None:
        """Once; the start waits for both nodes."""
        body = msgspec.to_builtins(LAYOUT)
        request = m.AttachRequest(layout=body)
        reply = self.hub.call("attach", self.name, request)
        while reply.state == "initialize":
            self._upload()
            reply = self.hub.call("attach", self.name, request)
        if reply.state != "ready":
            return
        place = Place(run=RUN, node=self.name, incarnation=reply.incarnation)
        self.machine = NodeMachine(LAYOUT, NumpyVectors(), "int8", place)
        for f, known in enumerate(reply.fragments):
            path = self.hub.call("snapshot_path", f, known.snapshot_version)
            snapshot = snapshot_from_frame(path.read_bytes(), LAYOUT.fragment_shape(f).element_count)
            base = snapshot.vectors["base"]
            self.theta.append(self.machine.load(f, base, known.snapshot_version, snapshot.header.counters))

    def _upload(self) -> None:
        for f in range(FRAGMENTS):
            base = np.random.default_rng(f).normal(size=LAYOUT.fragment_shape(f).element_count).astype(np.float32)
            counters = (0,) if f == 0 else ()
            header = SnapshotHeader(
                run=RUN, fragment=f, version=0, layout_digest=LAYOUT.digest,
                digest=base_digest(base, counters), parts=("base",), counters=counters,
            )  # fmt: skip
            try:
                self.hub.call("put_snapshot", self.name, f, Snapshot(header=header, vectors={"base": base}).to_frame())
            except ConflictError:
                continue  # the hub was killed: it has this one already, or does not know who uploads

    def work(self) -> None:
        """Lease, one step, push, hear the answers, pull."""
        if self.machine is None:
            return self.attach()
        self._lease()
        self._step()
        for f in range(FRAGMENTS):
            if self.machine.can_push(f, 1):
                push = self.machine.push(f, self.theta[f], (self.request_id,) if f == 0 else ())
                reply = self.hub.call("push", self.name, push.to_frame())
                assert reply.status in ("accepted", "duplicate"), reply
        self.hub.call("tick")
        self.pull()
        return None

    def _lease(self) -> None:
        assert self.machine is not None
        request = m.LeaseRequest(incarnation=self.machine.place.incarnation, count=2, request_id=self.request_id + 1)
        reply = self.hub.call("lease", self.name, request)
        if reply.status == "granted":
            self.request_id += 1
            self.todo += [n for start, stop in reply.ranges for n in range(start, stop)]
        self.finished = reply.status == "finished"

    def _step(self) -> None:
        assert self.machine is not None
        for sample in self.todo:
            for theta in self.theta:
                theta += np.random.default_rng(sample).normal(size=len(theta)).astype(np.float32)
            self.machine.stepped(3, [(sample, sample + 1)])
        self.trained += self.todo
        self.todo = []

    def pull(self) -> None:
        assert self.machine is not None
        for f, replica in enumerate(self.machine.replicas):
            frames = self.hub.call("entries_after", f, replica.version, 1 << 30)
            for frame in split_frames(b"".join(frames), "entry"):
                self.machine.merge(entry_from_frame(frame), self.theta[f])


Rounds = list[list[tuple[str, int, int]]]
"""The pushes that each entry merged, per fragment and version."""


def whole_run(folder: Path, bombs: list[int]) -> tuple[int, Rounds, list[str]]:
    """Both nodes train everything. Returns how often the hub was killed, its rounds and the final digests."""
    hub = Hub(folder, bombs)
    nodes = [Node(name=name, hub=hub) for name in ("n0", "n1")]
    for _ in range(100):
        for node in nodes:
            node.work()
        if all(node.finished for node in nodes):
            break
    assert all(node.finished for node in nodes), "the run does not come to its end"
    for node in nodes:
        node.pull()
    hub.end()
    return hub.kills, *check_end(folder, nodes)


def check_end(folder: Path, nodes: list[Node]) -> tuple[Rounds, list[str]]:
    """The ledger's files, read by a new hub, against what the nodes have."""
    ledger = open_ledger(folder)
    counts = ledger.info(full=False)["samples"]
    assert (counts.committed, counts.duplicated, counts.lost) == (TOTAL, 0, 0)
    assert sorted(n for node in nodes for n in node.trained) == list(range(TOTAL)), "a sample was trained twice"
    rounds: Rounds = []
    for f, fragment in enumerate(ledger.fragments):
        entries = [fragment.store.entry(v) for v in range(1, fragment.store.version + 1)]
        merged = [[(c.node, c.incarnation, c.sequence) for c in e.header.contributors] for e in entries]
        rounds += merged
        keys = [key for keys in merged for key in keys]
        assert len(keys) == len(set(keys)), "a push merged twice"
        for node in nodes:
            assert node.machine is not None
            replica = node.machine.replicas[f]
            assert (replica.version, replica.digest) == (fragment.aggregator.version, fragment.aggregator.digest)
            assert replica.in_flight is None
            sent = [k for k in keys if k[0] == node.name]
            assert [k[2] for k in sent] == list(range(1, len(sent) + 1)), "a push is missing"
        check_no_file_too_many(fragment.store)
    digests = [f.aggregator.digest for f in ledger.fragments]
    ledger.close()
    return rounds, digests


def check_no_file_too_many(store: FragmentStore) -> None:
    """Two snapshots at most, pushes only for entries that the older one does not cover."""
    versions = store.snapshot_versions()
    assert len(versions) <= 2
    expected = {f"{v:010d}.{kind}" for v in versions for kind in ("base", "hub")}
    assert {path.name for path in (store.folder / "snapshots").iterdir()} == expected
    needed = {key for v in range(versions[0] + 1, store.version + 1) for key in settled_keys(store.entry(v).header)}
    assert set(store.push_keys()) == needed


def hub_is_killed_at_every_write_point(folder: Path) -> None:
    kills, *undisturbed = whole_run(folder / "0", [])
    assert kills == 0
    point, tried, same = 1, 0, 0
    while True:
        tried += 1
        # The second hub is killed as well, early: while it opens its files or soon after.
        kills, rounds, digests = whole_run(folder / str(point), [point, 1 + point % 7])
        if rounds == undisturbed[0]:
            same += 1
            assert digests == undisturbed[1], "the same pushes in the same rounds gave another result"
        if kills == 0:
            assert point > 60
            assert same > tried / 2
            return
        point += STRIDE

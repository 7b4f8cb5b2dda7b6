"""A worker without torch: it trains nothing, but speaks the whole protocol of a run over the wire."""

import time
from typing import Any

import msgspec
import numpy as np
from hub_process import NodeOnWire, eventually

from ciuic.codec import NumpyVectors
from ciuic.ledger.entry import Push, Snapshot, SnapshotHeader, base_digest, entry_from_frame, snapshot_from_frame
from ciuic.ledger.frame import split_frames
from ciuic.ledger.layout import Layout, Tensor, make_layout
from ciuic.ledger.node import NodeMachine, Place
from ciuic.net import messages as m


def small_layout() -> Layout:
    return make_layout(
        [
            Tensor(name="embed", shape=(32, 64), dtype="float32", section="coded", row_aligned=True),
            Tensor(name="matrix", shape=(64, 64), dtype="float32", section="coded"),
            Tensor(name="norm", shape=(64,), dtype="float32", section="small"),
        ],
        1,
    )


class WireWorker:
    """One incarnation of a node's worker in a run with one fragment."""

    def __init__(self, node: NodeOnWire, run_id: str, *, seed: int = 0) -> None:
        self.node, self.run_id = node, run_id
        self.client = node.connect()
        self.layout = small_layout()
        self.count = self.layout.fragment_shape(0).element_count
        self.random = np.random.default_rng(seed)
        self.request_id = 0
        self.steps = 0
        self.last_push: Push | None = None
        self.trained: list[int] = []

    @property
    def path(self) -> str:
        return f"/v1/runs/{self.run_id}"

    def try_attach(self) -> m.AttachReply:
        layout = self.layout
        request = m.AttachRequest(layout=msgspec.to_builtins(layout), dataset_samples=10_000)
        return self.client.call("POST", f"{self.path}/attach", request, m.AttachReply)

    def attach(self) -> m.AttachReply:
        """Attach, uploading version 0 when told to, until the run is ready for us."""

        def ready() -> m.AttachReply | None:
            reply = self.try_attach()
            if reply.state == "initialize":
                self.client.send_frame(
                    f"{self.path}/snapshot?fragment=0&version=0", self.version_0(), m.Ok, method="PUT"
                )
            return reply if reply.state == "ready" else None

        reply = eventually(ready)
        assert reply is not None
        place = Place(run=self.run_id, node=self.node.node_id, incarnation=reply.incarnation)
        self.machine = NodeMachine(self.layout, NumpyVectors(), "1-bit", place)
        state = reply.fragments[0]
        frame = self.client.fetch(f"{self.path}/snapshot?fragment=0&version={state.snapshot_version}")
        assert len(frame) == state.snapshot_bytes
        snapshot = snapshot_from_frame(frame, self.count)
        self.theta = self.machine.load(0, snapshot.vectors["base"], snapshot.header.version)
        self.pull(wait_s=0)
        return reply

    def version_0(self) -> bytes:
        base = np.linspace(-1, 1, self.count, dtype=np.float32)
        header = SnapshotHeader(
            run=self.run_id,
            fragment=0,
            version=0,
            layout_digest=self.layout.digest,
            digest=base_digest(base),
            parts=("base",),
        )
        return Snapshot(header=header, vectors={"base": base}).to_frame()

    @property
    def incarnation(self) -> int:
        return self.machine.place.incarnation

    @property
    def version(self) -> int:
        return self.machine.replicas[0].version

    @property
    def digest(self) -> str:
        return self.machine.replicas[0].digest

    def lease(self, count: int = 8) -> m.LeaseReply:
        self.request_id += 1
        request = m.LeaseRequest(incarnation=self.incarnation, count=count, request_id=self.request_id)
        reply = self.client.call("POST", f"{self.path}/lease", request, m.LeaseReply)
        if reply.status != "granted":
            self.request_id -= 1
        return reply

    def train(self, reply: m.LeaseReply) -> None:
        for start, stop in reply.ranges:
            self.theta += self.random.normal(size=self.count).astype(np.float32) * np.float32(0.01)
            self.machine.stepped(10 * (stop - start), [(start, stop)])
            self.trained.extend(range(start, stop))
            self.steps += 1

    def push(self) -> m.PushReply:
        self.last_push = self.machine.push(0, self.theta)
        return self.send(self.last_push)

    def send(self, push: Push) -> m.PushReply:
        return self.client.send_frame(f"{self.path}/push", push.to_frame(), m.PushReply)

    def pull(self, *, wait_s: float = 0.5) -> int:
        """Merge what is new; returns how many entries that was."""
        body = self.client.fetch(f"{self.path}/entries?fragment=0&after={self.version}&wait_s={wait_s}")
        frames = list(split_frames(body, "entry"))
        for frame in frames:
            self.machine.merge(entry_from_frame(frame), self.theta)
        return len(frames)

    def report(self, **fields: Any) -> None:
        request = m.ReportRequest(
            incarnation=self.incarnation,
            step=self.steps,
            samples=len(self.trained),
            tokens=10 * len(self.trained),
            **fields,
        )
        self.client.call("POST", f"{self.path}/report", request, m.Ok)

    def round(self) -> m.LeaseReply:
        """Lease, train, push; the entry is awaited by `settle`."""
        reply = self.lease()
        if reply.status == "granted":
            self.train(reply)
            assert self.push().status in ("accepted", "duplicate")
        return reply

    def settle(self, *, within_s: float = 20.0) -> None:
        """Pull until our push has come back."""
        until = time.monotonic() + within_s
        while self.machine.replicas[0].in_flight is not None:
            self.pull()
            assert time.monotonic() < until, "our push does not come back"

    def finish(self) -> None:
        """The final base, the final loss, goodbye."""
        final = self.lease()
        assert final.status == "finished"
        eventually(lambda: self.pull(wait_s=0.2) >= 0 and self.version == final.final_versions[0])
        self.report(final_digests=[self.digest])
        evaluation = m.EvaluationRequest(
            incarnation=self.incarnation, version=self.version, loss=1.5, samples=10, final=True
        )
        self.client.call("POST", f"{self.path}/evaluation", evaluation, m.Ok)
        detach = m.DetachRequest(incarnation=self.incarnation, reason="finished")
        self.client.call("POST", f"{self.path}/detach", detach, m.Ok)

    def run_to_end(self) -> None:
        """Train until nothing is left, then finish."""
        self.settle()
        while (reply := self.round()).status != "finished":
            if reply.status == "wait":
                time.sleep(0.05)
            self.settle()
        self.finish()

"""One RunLedger with a clock that stands still, and nodes that are only names: a test sends what it wants to send."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from ledger_frames import memory_folder
from ledger_world import small_layout

from ciuic.codec import FragmentCodec
from ciuic.hub.run.rounds import RunLedger
from ciuic.job import parse_job
from ciuic.ledger.entry import Push as LedgerPush
from ciuic.ledger.entry import PushHeader, Snapshot, SnapshotHeader, base_digest, entry_from_frame
from ciuic.ledger.layout import Layout
from ciuic.net import messages as m

RUN = "r1"
Make = Callable[..., "Rounds"]


@contextmanager
def many_rounds() -> Iterator[Make]:
    """Makes `Rounds`, each in a folder of its own, and closes them in the end."""
    opened: list[Rounds] = []
    with memory_folder() as folder:

        def make(**options: Any) -> Rounds:
            opened.append(Rounds(folder / str(len(opened)), **options))
            return opened[-1]

        yield make
        for rounds in opened:
            rounds.ledger.close()


class Rounds:
    """The system under test. `incarnations` and `sequences` are what each node's newest worker would know."""

    def __init__(self, folder: Path, *, samples: int | None = 100, fragments: int = 1, min_nodes: int = 1, **sync: Any):
        self.folder, self.now = folder, 1000.0
        self.layout = small_layout(fragments)
        train = {"samples": samples} if samples else {}
        sync = {"compression": "int8", "deadline": 5.0, **sync}
        self.job = parse_job({"train": train, "nodes": {"min": min_nodes}, "sync": sync})
        self.events: list[tuple[str, str, str]] = []
        self.wakes = 0
        self.incarnations: dict[str, int] = {}
        self.sequences: dict[tuple[str, int], int] = {}
        self.request_ids: dict[str, int] = {}
        self.ledger = self._open()

    def _open(self) -> RunLedger:
        return RunLedger.open(
            self.folder,
            self.job,
            run_id=RUN,
            clock=lambda: self.now,
            emit=lambda kind, text, node, data: self.events.append((kind, text, node)),
            wake=self._woken,
        )

    def _woken(self) -> None:
        self.wakes += 1

    def restart(self) -> None:
        """kill -9 and open again: only the files remain."""
        self.ledger.close()
        self.ledger = self._open()

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]

    def latest(self, kind: str) -> str:
        """The text of the latest event of this kind."""
        return next(text for other, text, _ in reversed(self.events) if other == kind)

    # ---- attaching

    def request(self, layout: Layout | None = None, **changes: Any) -> m.AttachRequest:
        layout = layout or self.layout
        fields = {"layout": msgspec.to_builtins(layout)}
        return m.AttachRequest(**fields | changes)

    def attach(self, node: str, **changes: Any) -> m.AttachReply:
        """One request."""
        reply = self.ledger.attach(node, self.request(**changes))
        if reply.state == "ready":
            self.incarnations[node] = reply.incarnation
            self.request_ids[node] = 0
            for f in range(self.layout.fragment_count):
                self.sequences[node, f] = 0
        return reply

    def start(self, *nodes: str) -> None:
        """All of these take their place; the first uploads version 0 when there is none."""
        for _ in range(2):
            for node in nodes:
                if node not in self.incarnations and self.attach(node).state == "initialize":
                    for f in range(self.layout.fragment_count):
                        self.upload(node, f)
                    self.attach(node)

    def upload(self, node: str, fragment: int = 0, base: np.ndarray | None = None, **changes: Any) -> None:
        self.ledger.put_snapshot(node, fragment, self.version_0(fragment, base, **changes))

    def version_0(self, fragment: int = 0, base: np.ndarray | None = None, **changes: Any) -> bytes:
        if base is None:
            count = self.layout.fragment_shape(fragment).element_count
            base = np.random.default_rng(fragment).normal(size=count).astype(np.float32)
        counters = changes.get("counters", (0,) if fragment == 0 else ())
        fields = {
            "run": RUN,
            "fragment": fragment,
            "version": 0,
            "layout_digest": self.layout.digest,
            "digest": base_digest(base, counters),
            "parts": ("base",),
            "counters": counters,
        }
        header = SnapshotHeader(**fields | changes)
        return Snapshot(header=header, vectors=dict.fromkeys(header.parts, base)).to_frame()

    # ---- leasing and pushing

    def lease(self, node: str, count: int = 10, *, request_id: int | None = None) -> m.LeaseReply:
        """A new request, or one with this id again."""
        if request_id is None:
            self.request_ids[node] += 1
            request_id = self.request_ids[node]
        request = m.LeaseRequest(incarnation=self.incarnations[node], count=count, request_id=request_id)
        return self.ledger.lease(node, request)

    def frame(self, node: str, *ranges: tuple[int, int], value: float = 0.01, **changes: Any) -> bytes:
        """A new push of a node; ranges are the samples it trained."""
        fragment = changes.get("fragment", 0)
        if "sequence" not in changes:
            self.sequences[node, fragment] += 1
        version = self.ledger.fragments[fragment].aggregator.version
        fields: dict[str, Any] = {
            "run": RUN,
            "node": node,
            "incarnation": self.incarnations[node],
            "sequence": self.sequences.get((node, fragment), 0),
            "fragment": fragment,
            "base_version": version,
            "epoch": 0,
            "tokens": max(1, sum(b - a for a, b in ranges)),
            "ranges": ranges,
            "codec": self.job.sync.codec_up,
            "layout_digest": self.layout.digest,
            "counters": (0,) if fragment == 0 else (),
        }
        header = PushHeader(**fields | changes)
        shape = self.layout.fragment_shape(fragment)
        values = np.full(shape.element_count, value, np.float32)
        return LedgerPush(header=header, payload=FragmentCodec(self.job.sync.codec_up, shape).encode(values)).to_frame()

    def push(self, node: str, *ranges: tuple[int, int], **changes: Any) -> m.PushReply:
        return self.ledger.push(node, self.frame(node, *ranges, **changes))

    def train(self, node: str, count: int = 5, **changes: Any) -> m.PushReply:
        """Lease, and push what was leased."""
        return self.push(node, *self.lease(node, count).ranges, **changes)

    def settled(self, *nodes: str) -> None:
        """Start these, and one round of all of them, so that rounds wait for each."""
        self.start(*nodes)
        frames = {node: self.frame(node, *self.lease(node, 2).ranges) for node in nodes}
        for node in nodes:  # a joiner is not waited for: let its push be there before the first member's
            if node != nodes[0]:
                assert self.ledger.push(node, frames[node]).status == "accepted"
        assert self.ledger.push(nodes[0], frames[nodes[0]]).status == "accepted"

    def tick(self, seconds: float = 0.0) -> float:
        self.now += seconds
        return self.ledger.tick()

    # ---- looking

    @property
    def version(self) -> int:
        return self.ledger.fragments[0].aggregator.version

    def entry_nodes(self, version: int, fragment: int = 0) -> list[str]:
        """Whose pushes an entry merged."""
        frame = self.ledger.entries_after(fragment, version - 1, 0)[0]
        return [c.node for c in entry_from_frame(frame).header.contributors]

    def counts(self) -> m.SampleCounts:
        return self.ledger.info(full=False)["samples"]

    def member(self, node: str) -> m.NodeInRun:
        return next(x for x in self.ledger.info(full=False)["nodes"] if x.node_id == node)

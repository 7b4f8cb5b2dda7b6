"""Nodes without a model: they join a real hub and push the same bytes round after round, over real TLS."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from ciuic.codec.payload import FragmentCodec
from ciuic.errors import CiuicError, RunFailedError
from ciuic.ledger.entry import Push, PushHeader, Snapshot, SnapshotHeader, base_digest
from ciuic.ledger.frame import split_frames
from ciuic.ledger.layout import Layout, Tensor, make_layout
from ciuic.net import messages as m
from ciuic.net.client import HubClient, join_network
from ciuic.net.tls import Purpose, write_private_file

WIDTH = 512
TOKENS = 4096
ATTACH_S = 60.0
_LONG_POLL_S = 20.0
_BEAT_S = 2.0


def transformer_layout(elements: int) -> Layout:
    """Blocks of a transformer of width 512 (3.1 M elements each), as many as come nearest to `elements`."""
    shapes = {
        "qkv": (3 * WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "wide": (4 * WIDTH, WIDTH),
        "narrow": (WIDTH, 4 * WIDTH),
    }
    tensors: list[Tensor] = []
    for block in range(max(1, round(elements / (12 * WIDTH**2)))):
        tensors += [Tensor(name=f"{block}.{n}", shape=s, dtype="float32", section="coded") for n, s in shapes.items()]
        norms = (f"{block}.before", f"{block}.between")
        tensors += [Tensor(name=name, shape=(WIDTH,), dtype="float32", section="small") for name in norms]
    return make_layout(tensors, 1)


class LoadNode:
    """One node: heartbeats on a thread of its own; `attach`, then `round` as often as wanted."""

    def __init__(self, hub_url: str, token: str, folder: Path, *, name: str) -> None:
        found = join_network(token, name, {}, url=hub_url)
        self.node_id, key, cert, self._authority = found
        self._url = hub_url
        self._cert, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        write_private_file(self._cert, cert)
        write_private_file(self._key, key)
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name=f"beat-{name}", daemon=True)
        self._beats.start()
        self._client = self._connect("updates")
        self.sent_bytes = self.received_bytes = 0
        self._version = self._sequence = self._incarnation = 0
        self._run = ""

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stop.set()
        self._client.close()
        self._beats.join(2 * _BEAT_S)

    def attach(self, run_id: str, layout: Layout, codec: str, *, seed: int) -> None:
        """Take a place in the run; the payload of all pushes is made here. Raises RunFailedError."""
        self._run, self._codec, self._layout = run_id, codec, layout
        self._sequence = 0
        shape = layout.fragment_shape(0)
        progress = np.random.default_rng(seed).normal(scale=1e-3, size=shape.element_count).astype(np.float32)
        self._payload = FragmentCodec(codec, shape).encode(progress)
        request = m.AttachRequest(layout=msgspec.to_builtins(layout), dataset_samples=10**9)
        reply = _until(lambda: self._try_attach(request, shape.element_count), f"{self.node_id} has a place")
        self._incarnation, self._version = reply.incarnation, reply.fragments[0].version

    def round(self) -> None:
        """Push, then take the entry. Raises RunFailedError when the hub refuses the push."""
        self.push()
        self.pull()

    @property
    def streams(self) -> int:
        """Connections that the next large push uses."""
        return self._client.fan.streams.count

    @property
    def repeated_share(self) -> float:
        """Of the bytes of the latest large push, those that the kernel sent again."""
        return self._client.fan.repeated_share

    def push(self) -> float:
        """Seconds from sending to the answer. Raises RunFailedError when the hub refuses it."""
        self._sequence += 1
        header = PushHeader(
            run=self._run,
            node=self.node_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            fragment=0,
            base_version=self._version,
            epoch=0,
            tokens=TOKENS,
            codec=self._codec,
            layout_digest=self._layout.digest,
        )
        frame = Push(header=header, payload=self._payload).to_frame()
        began_s = time.perf_counter()
        reply = self._client.push(f"{m.API}/runs/{self._run}", frame, 0)
        took_s = time.perf_counter() - began_s
        if reply.status != "accepted":
            raise RunFailedError(f"the hub {reply.status} a push", cause=f"{reply.reason}: {reply.detail}")
        self.sent_bytes += len(frame)
        return took_s

    def pull(self) -> None:
        """Take the entries after the version that is known."""
        path = f"{m.API}/runs/{self._run}/entries?fragment=0&after={self._version}&wait_s={_LONG_POLL_S:g}"
        data = self._client.fetch(path, timeout_s=_LONG_POLL_S + 15)
        self.received_bytes += len(data)
        self._version += sum(1 for _ in split_frames(data, "entry"))

    def _try_attach(self, request: m.AttachRequest, count: int) -> m.AttachReply | None:
        reply = self._client.call("POST", f"{m.API}/runs/{self._run}/attach", request, m.AttachReply)
        if reply.state == "initialize":
            self._client.put_version_0(f"{m.API}/runs/{self._run}", self._version_0(count), 0)
        return reply if reply.state == "ready" else None

    def _version_0(self, count: int) -> bytes:
        base = np.zeros(count, dtype=np.float32)
        header = SnapshotHeader(
            run=self._run,
            fragment=0,
            version=0,
            layout_digest=self._layout.digest,
            digest=base_digest(base),
            parts=("base",),
        )
        return Snapshot(header=header, vectors={"base": base}).to_frame()

    def _connect(self, purpose: Purpose) -> HubClient:
        return HubClient(self._url, self._authority, self._cert, self._key, purpose)

    def _beat(self) -> None:
        client, sequence, revision = self._connect("control"), 0, 0
        while not self._stop.is_set():
            sequence += 1
            request = m.HeartbeatRequest(
                agent_incarnation="load", sequence=sequence, known_revision=revision, wait_s=_BEAT_S
            )
            with contextlib.suppress(CiuicError):  # the hub is ended before the nodes
                revision = client.call("POST", f"{m.API}/node/heartbeat", request, m.HeartbeatReply).revision
                continue
            self._stop.wait(0.2)
        client.close()


def _until(attempt: Callable[[], m.AttachReply | None], said: str) -> m.AttachReply:
    """Repeats while the run has not been assigned yet."""
    until = time.monotonic() + ATTACH_S
    problem: CiuicError | None = None
    while time.monotonic() < until:
        try:
            if reply := attempt():
                return reply
        except CiuicError as error:
            problem = error
        time.sleep(0.1)
    raise RunFailedError(f"not seen within {ATTACH_S:.0f} s: {said}", cause=str(problem or "")) from problem

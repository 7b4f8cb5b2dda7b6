"""The parameter server at a hub: this program is a worker of a run, and its updates are pushes of that run.

The job should say `[sync] policy = "async"`; with `sync` an update waits for its round. Residuals of the codec stay
with this process, so updates are compressed with error feedback like everything that a node pushes.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from ciuic.codec import NumpyVectors
from ciuic.errors import ConflictError, NonFiniteError, UsageError
from ciuic.ledger.entry import Entry, Snapshot, SnapshotHeader, base_digest, entry_from_frame, snapshot_from_frame
from ciuic.ledger.frame import split_frames
from ciuic.ledger.node import NodeMachine, Place
from ciuic.net import messages as m
from ciuic.net.client import HubClient, retrying
from ciuic.net.places import Line, Places
from ciuic.net.url import parse_hub_url
from ciuic.parameter_server.arrays import Delta, Float, flatten, layout_of, split
from ciuic.train.runfile import read_run_file

ATTACH_AGAIN_S = 0.3
ENTRY_WAIT_S = 20.0
OWN_HUB = "hub"
"""Stands for the address of the hub that this program's run is at."""
T = TypeVar("T")


class RunLedgerClient:
    """One worker's place in a run, without a training loop. Thread-safe; attaches when it is first used."""

    def __init__(self, url: str, params: Mapping[str, Any]) -> None:
        """Raises UsageError, NotInRunError."""
        self._info = read_run_file()
        known = parse_hub_url(self._info.hub_url).url
        asked = known if url == OWN_HUB else parse_hub_url(url).url
        if asked != known:
            raise UsageError(
                f"this program runs for the hub at {known}, not {asked}", next="give the address of its own hub"
            )
        if not params:
            raise UsageError("a run needs parameters to start from", next="give params= with the model's state")
        self.layout = layout_of(params)
        self._initial = flatten(self.layout, params, whole=True)
        self._stop = threading.Event()
        self._lock = threading.RLock()
        self._machine: NodeMachine | None = None
        self._theta: Any = None
        self._entries: list[Entry] = []
        self._first = 0
        """Version after which `_entries` begin."""
        self._pulled = 0
        self._requests = 0
        self._places = Places(run_id=self._info.run_id, connect=self._info.connect)
        self._line = Line(self._places, "updates")
        self._control = self._info.connect("control")

    # ---- what is known

    @property
    def _replica(self) -> Any:
        return self._attached().replicas[0]

    @property
    def version(self) -> int:
        """Of the parameters here, as of the last push or pull."""
        return int(self._replica.version)

    @property
    def digest(self) -> str:
        return str(self._replica.digest)

    @property
    def node_versions(self) -> dict[str, int]:
        """Of this node: each node knows its own."""
        self._attached()
        return {self._info.node_id: self._pulled}

    @property
    def params(self) -> dict[str, Float]:
        with self._lock:
            return split(self.layout, self._replica.base.copy())

    # ---- the place in the run

    def _attached(self) -> NodeMachine:
        with self._lock:
            if self._machine is None:
                reply = self._take_place()
                info = self._info
                place = Place(run=info.run_id, node=info.node_id, incarnation=reply.incarnation, epoch=reply.epoch)
                codec = reply.pace.codec_up if reply.pace else "none"
                self._machine = NodeMachine(self.layout, NumpyVectors(), codec, place)
                self._load(self._machine, reply.fragments[0])
            return self._machine

    def _take_place(self) -> m.AttachReply:
        request = m.AttachRequest(layout=msgspec.to_builtins(self.layout))
        while True:
            reply = self._post("attach", request, m.AttachReply)
            self._places.urls = [fragment.url for fragment in reply.fragments]
            if reply.state == "ready":
                return reply
            if reply.state == "initialize":
                self._upload()
            time.sleep(ATTACH_AGAIN_S)

    def _upload(self) -> None:
        header = SnapshotHeader(
            run=self._info.run_id,
            fragment=0,
            version=0,
            layout_digest=self.layout.digest,
            digest=base_digest(self._initial),
            parts=("base",),
        )
        frame = Snapshot(header=header, vectors={"base": self._initial}).to_frame()
        try:
            self._say("snapshot?fragment=0&version=0", lambda c, p: c.send_frame(p, frame, m.Ok, method="PUT"))
        except ConflictError:  # it is there already
            return

    def _load(self, machine: NodeMachine, state: m.FragmentState) -> None:
        if state.version == 0 and state.digest == base_digest(self._initial):
            self._theta = machine.load(0, self._initial, 0)
        else:
            frame = self._say(f"snapshot?fragment=0&version={state.snapshot_version}", lambda c, p: c.fetch(p))
            self._theta = machine.load_snapshot(0, snapshot_from_frame(frame, len(self._initial)))
        self._first = self._pulled = machine.replicas[0].version

    # ---- pushes

    def push(self, node: str, update: Any, sequence: int | None, base_version: int | None, tokens: int) -> int:
        """As LocalLedger.push; its samples are leased from the run. `sequence` and `base_version` are the ledger's."""
        if node != self._info.node_id:
            raise UsageError(f"this program pushes for {self._info.node_id}, not for {node}")
        if sequence is not None or base_version is not None:
            raise UsageError("a hub numbers pushes and versions itself", next="leave sequence and base_version out")
        flat = flatten(self.layout, update, whole=False)
        with self._lock:
            machine = self._attached()
            while self._replica.in_flight is not None:
                self._fetch(ENTRY_WAIT_S)
            self._theta -= flat  # from the base, or from what an entry has rejected as too stale
            machine.stepped(tokens, self._lease(tokens))
            try:
                push = machine.push(0, self._theta)
            except NonFiniteError:
                self._theta[:] = self._replica.base  # the samples go with the next push
                raise
            frame = push.to_frame()
            reply = self._say("push", lambda c, p: c.send_frame(p, frame, m.PushReply))
            if reply.pace is not None:
                machine.use(reply.pace.codec_up)
            if reply.status == "rejected":
                machine.rejected(0, push.header.sequence)
                self._theta += flat
                kind = NonFiniteError if reply.reason == "not-finite" else ConflictError
                raise kind(
                    f"the update was rejected ({reply.reason})", cause=reply.detail, next="pull, then push again"
                )
            return max(reply.hub_version, self.version)

    def _lease(self, count: int) -> list[tuple[int, int]]:
        self._requests += 1
        incarnation = self._attached().place.incarnation
        request = m.LeaseRequest(incarnation=incarnation, count=count, request_id=self._requests)
        reply = self._post("lease", request, m.LeaseReply)
        if reply.status == "finished":
            raise ConflictError("the run is complete", cause="all its samples are committed", next="close the server")
        return list(reply.ranges)

    # ---- pulls

    def pull(self, node: str) -> Delta | None:
        """As LocalLedger.pull."""
        with self._lock:
            self._attached()
            self._fetch(0.0)
            if node != self._info.node_id:
                raise UsageError(f"this program pulls for {self._info.node_id}, not for {node}")
            if self._pulled == self.version:
                return None
            delta = self.delta(self._pulled)
            self._pulled = delta.to_version
            return delta

    def delta(self, from_version: int) -> Delta:
        """As LocalLedger.delta, of what has arrived here."""
        with self._lock:
            self._attached()
            if not self._first <= from_version <= self.version:
                raise ConflictError(
                    f"there is no delta from version {from_version}",
                    cause=f"versions {self._first} to {self.version} are here",
                    next="load the parameters again (server.params)",
                )
            return Delta(self.layout, self._entries[from_version - self._first :], from_version)

    def _fetch(self, wait_s: float) -> None:
        machine = self._attached()
        query = f"entries?fragment=0&after={self.version}&wait_s={wait_s:g}"
        data = self._say(query, lambda c, p: c.fetch(p, timeout_s=wait_s + 15))
        for frame in split_frames(data, "entry"):
            entry = entry_from_frame(frame)
            machine.merge(entry, self._theta)
            self._entries.append(entry)

    def close(self) -> None:
        """Leave the run."""
        with self._lock:
            self._stop.set()
            if self._machine is not None:
                reason = m.DetachRequest(incarnation=self._machine.place.incarnation, reason="finished")
                self._post("detach", reason, m.Ok)
            self._line.close()
            self._control.close()

    # ---- speaking

    def _post(self, what: str, message: msgspec.Struct, reply_type: type[T]) -> T:
        path = f"{m.API}/runs/{self._info.run_id}/{what}"
        return retrying(lambda: self._control.call("POST", path, message, reply_type), stop=self._stop, what=what)

    def _say(self, what: str, call: Callable[[HubClient, str], T]) -> T:
        path = f"{m.API}/runs/{self._info.run_id}/{what}"
        return self._line.say(0, lambda client: call(client, path), stop=self._stop, what=what.partition("?")[0])

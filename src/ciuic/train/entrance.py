"""How a worker takes its place in a run: attach, upload version 0 or load the newest base, catch up."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from ciuic.errors import CannotCatchUpError, CiuicError, ConflictError, NotFoundError, ProtocolError
from ciuic.ledger.entry import Entry, Snapshot, SnapshotHeader, base_digest, entry_from_frame, snapshot_from_frame
from ciuic.ledger.frame import split_frames
from ciuic.ledger.node import NodeMachine, Place
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.net.peer_messages import SourceOutcome
from ciuic.net.places import Line, Places
from ciuic.train.ahead import Fetched, snapshot_file
from ciuic.train.approach import Approach
from ciuic.train.catching import CatchUp, Fetch, check_expired
from ciuic.train.courier import Courier, persistently, post
from ciuic.train.early import EarlyEntries, entries_path
from ciuic.train.ledger_copy import start_copy
from ciuic.train.runfile import RunFile
from ciuic.train.state import ModelState

ATTACH_AGAIN_S = 0.3
_log = logging.getLogger("ciuic.train")


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What the hub wants to know of this node's data."""

    samples: int
    """0 for a stream."""
    digest: str = ""
    samples_per_step: int = 1
    """Of the whole node (all ranks)."""


@dataclass(kw_only=True)
class Entrance:
    """One attachment of one worker."""

    info: RunFile
    state: ModelState
    data: DataFacts
    approach: Approach
    courier: Courier
    uploaded: Callable[[], None]
    """Called once this worker's parameters are version 0 and the model holds them."""
    placed: Callable[[m.AttachReply], None]
    """Called when this worker has its place and, but for the newest entries, its bases."""
    _places: Places = field(init=False)
    _line: Line = field(init=False)
    _client: HubClient = field(init=False)
    _incarnation: int = 0
    _early: EarlyEntries | None = None

    def enter(self) -> tuple[m.AttachReply, NodeMachine]:
        """Take this worker's place; the model then holds the newest base of every fragment."""
        client = self.approach.connect("control")
        self._client = client
        self._places = self.courier.places = Places(run_id=self.info.run_id, connect=self.approach.connect)
        self._line = Line(self._places, "snapshots")
        self.state.gather()
        counters = self.state.counters()
        fragments = range(self.state.layout.fragment_count)
        initial = [base_digest(self._host(f), counters if f == 0 else ()) for f in fragments]
        _log.debug("joining: asking for a place")
        reply = self._take_place(client, initial)
        _log.debug("joining: has its place")
        try:
            reply, machine = self._fill(reply, initial)
        except CannotCatchUpError as error:
            self._say_goodbye(client, error)
            raise
        self.state.scatter()
        client.close()
        self._line.close()
        return reply, machine

    def _fill(self, reply: m.AttachReply, initial: list[str]) -> tuple[m.AttachReply, NodeMachine]:
        """Load the newest bases. A snapshot that was replaced meanwhile means to begin again, a few times."""
        expired = 0
        while True:
            try:
                return reply, self._machine(reply, initial)
            except NotFoundError as error:
                expired += 1
                _log.warning("%s; beginning again", error)
                check_expired(expired)
                if self.courier.copy is not None:
                    self.courier.copy.close()
                reply = self._take_place(self._client, initial)

    def _say_goodbye(self, client: HubClient, error: CannotCatchUpError) -> None:
        detach = m.DetachRequest(incarnation=self._incarnation, reason="behind", detail=error.cause)
        persistently(
            lambda: post(client, self.info.run_id, "detach", detach), stop=self.courier.stop, what="saying goodbye"
        )
        client.close()
        self._line.close()

    def _machine(self, reply: m.AttachReply, initial: list[str]) -> NodeMachine:
        self._incarnation = reply.incarnation
        place = Place(run=self.info.run_id, node=self.info.node_id, incarnation=reply.incarnation, epoch=reply.epoch)
        if reply.pace is None:
            raise ProtocolError("the hub did not say how to push", next="use the same version of ciuic on both sides")
        machine = NodeMachine(self.state.layout, self.state.vectors, reply.pace.codec_up, place)
        self.courier.copy = copy = start_copy(self.info, self.state.layout)
        try:
            for number, fragment in enumerate(reply.fragments):
                self._load(machine, number, fragment, initial[number])
                if number == len(reply.fragments) - 1:
                    self.placed(reply)
                self._catch_up(machine, number)
        finally:
            self._drop_early()
        if copy is not None:
            copy.caught_up(reply.total_samples)
        return machine

    def apply(self, machine: NodeMachine, entry: Entry) -> None:
        """theta (gathered) and base of its fragment move to the entry's version."""
        fragment = entry.header.fragment
        machine.merge(entry, self.state.theta_of(fragment))
        if fragment == 0:
            self.state.raise_counters(entry.header.counters)

    def _host(self, fragment: int) -> Any:
        """theta of a fragment on the host, as a numpy vector."""
        return self.state.vectors.to_host(self.state.theta_of(fragment))

    def _take_place(self, client: HubClient, initial: list[str]) -> m.AttachReply:
        request = m.AttachRequest(
            layout=msgspec.to_builtins(self.state.layout),
            frozen_digest=self.state.frozen_digest,
            dataset_samples=self.data.samples,
            data_digest=self.data.digest,
            torch_version=str(torch.__version__),
            device=str(self.state.device),
        )
        told = False
        while True:
            reply: m.AttachReply = persistently(
                lambda: post(client, self.info.run_id, "attach", request, m.AttachReply),
                stop=self.courier.stop,
                what="attaching",
            )
            self._places.urls = [fragment.url for fragment in reply.fragments]
            if reply.state == "ready":
                return reply
            if reply.state == "initialize":
                self._initialize(initial)
                continue
            if not told:
                _log.info("waiting for %d nodes to start together", self.info.job.nodes.min)
                told = True
            time.sleep(ATTACH_AGAIN_S)

    def _initialize(self, digests: list[str]) -> None:
        """Upload version 0 of every fragment."""
        try:
            for fragment, digest in enumerate(digests):
                self._upload(fragment, digest)
        except ConflictError as error:  # it is there already: another worker's, or ours and the answer was lost
            _log.info("version 0 was not taken: %s", error)
            return
        self.uploaded()

    def _upload(self, fragment: int, digest: str) -> None:
        header = SnapshotHeader(
            run=self.info.run_id,
            fragment=fragment,
            version=0,
            layout_digest=self.state.layout.digest,
            digest=digest,
            parts=("base",),
            counters=self.state.counters() if fragment == 0 else (),
        )
        frame = Snapshot(header=header, vectors={"base": self._host(fragment)}).to_frame()
        path = f"{m.API}/runs/{self.info.run_id}"
        self._line.say(
            fragment,
            lambda client: client.put_version_0(path, frame, fragment),
            stop=self.courier.stop,
            what="uploading version 0",
        )

    def _load(self, machine: NodeMachine, number: int, fragment: m.FragmentState, initial: str) -> None:
        """theta = the newest base that costs least: what we have when it is the same, else the snapshot."""
        theta = self.state.theta_of(number)
        if fragment.version == 0 and fragment.digest == initial:
            counters = self.state.counters() if number == 0 else ()
            theta[:] = machine.load(number, self._host(number), 0, counters)
            if self.courier.copy is not None:
                self.courier.copy.began(number, self._host(number), counters)
            return
        found = self.approach.base(number, fragment, self.courier.stop)
        if found is not None:
            self._early = found.early
        if self._early is None and not fragment.url:
            self._early = EarlyEntries(self.approach.connect("snapshots"), self.info.run_id, number, fragment)
        if found is None:
            found = self._download(number, fragment)
        _log.debug("joining: has the snapshot of fragment %d, version %d", number, found.version)
        snapshot = self._read(number, found)
        theta[:] = machine.load_snapshot(number, snapshot)
        if machine.replicas[number].digest != snapshot.header.digest:
            raise ProtocolError(
                f"the snapshot of version {snapshot.header.version} has another digest than its header says"
            )
        if number == 0:
            self.state.raise_counters(snapshot.header.counters)

    def _download(self, number: int, fragment: m.FragmentState) -> Fetched:
        version = fragment.snapshot_version
        file = snapshot_file(self.info.folder, number, version)
        path = f"{m.API}/runs/{self.info.run_id}"
        outcomes = self._line.say(
            number,
            lambda client: client.download_snapshot(path, file, fragment, number),
            stop=self.courier.stop,
            what="downloading the snapshot",
        )
        return Fetched(version=version, outcomes=outcomes, early=None)

    def _read(self, number: int, found: Fetched) -> Snapshot:
        """The snapshot that was fetched; its file then belongs to the copy of the ledger."""
        file = snapshot_file(self.info.folder, number, found.version)
        self._tell_sources(number, found.version, found.outcomes)
        snapshot = snapshot_from_frame(file.read_bytes(), self.state.layout.fragment_shape(number).element_count)
        if self.courier.copy is not None:
            self.courier.copy.loaded(number, found.version, file)
        file.unlink(missing_ok=True)
        if snapshot.header.layout_digest != self.state.layout.digest:
            raise ProtocolError("the snapshot is for another layout")
        return snapshot

    def _tell_sources(self, number: int, version: int, outcomes: list[SourceOutcome]) -> None:
        """How it went with other nodes that hold the snapshot; nothing depends on whether the hub hears it."""
        for one in outcomes:
            _log.info("%d bytes of the snapshot from %s %s", one.taken_bytes, one.url, one.detail)
        if outcomes:
            with suppress(CiuicError):
                report = m.SourcesReport(fragment=number, version=version, sources=outcomes)
                post(self._client, self.info.run_id, "sources", report)

    def _catch_up(self, machine: NodeMachine, fragment: int) -> None:
        """Apply all entries there are, before the first step. Raises CannotCatchUpError."""
        try:
            self._apply_newer(machine, fragment)
        finally:
            self._drop_early()

    def _apply_newer(self, machine: NodeMachine, fragment: int) -> None:
        catching = CatchUp(near=max(1, self.info.job.sync.max_staleness))
        while True:
            began_s = time.monotonic()
            version = machine.replicas[fragment].version
            data = self._newer(fragment, version)
            _log.debug("joining: has %d bytes of entries of fragment %d", len(data), fragment)
            if not data:
                return
            seconds = time.monotonic() - began_s
            entry: Entry | None = None
            for frame in split_frames(data, "entry"):
                entry = entry_from_frame(frame)
                self.apply(machine, entry)
                if self.courier.copy is not None:
                    self.courier.copy.entry(fragment, frame)
            if entry is not None and self._is_near(catching, entry, version, len(data), seconds):
                return

    def _newer(self, fragment: int, version: int) -> bytes:
        """The entries after this version: those that came beside the snapshot, or else the hub is asked."""
        if self._early is not None and self._early.after == version:
            data = self._early.take(self.courier.stop)
            if data == b"" and self._is_behind(fragment, version):
                data = self._early.take(self.courier.stop, are_due=True)
            if data is not None:
                return data
        self._drop_early()
        path = entries_path(self.info.run_id, fragment, version)
        return self._line.say(fragment, lambda client: client.fetch(path), stop=self.courier.stop, what="catching up")

    def _is_behind(self, fragment: int, version: int) -> bool:
        """Whether the hub has a newer version: on a slow link entries may be on their way that nothing shows yet."""
        with suppress(CiuicError):
            states = self._client.call("GET", f"{m.API}/runs/{self.info.run_id}/bases", None, m.BasesReply).fragments
            return fragment < len(states) and states[fragment].version > version
        return False

    def _drop_early(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None

    def _is_near(self, catching: CatchUp, entry: Entry, before: int, size_bytes: int, seconds: float) -> bool:
        """After entries up to this one, from the one after version `before` on."""
        header = entry.header
        age_s = time.monotonic() - header.time  # compared with others of this kind only
        return catching.fetched(
            Fetch(entries=header.version - before, size_bytes=size_bytes, seconds=seconds, age_s=age_s)
        )

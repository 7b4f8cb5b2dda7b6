"""How a worker takes its place in a run: attach, upload version 0 or load the newest base, catch up."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
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
from ciuic.net.tls import Purpose
from ciuic.train.catching import CatchUp, Fetch, check_expired
from ciuic.train.courier import Courier, persistently, post
from ciuic.train.early import EarlyEntries
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
    connect: Callable[[Purpose], HubClient]
    courier: Courier
    uploaded: Callable[[], None]
    """Called once this worker's parameters are version 0 and the model holds them."""
    _places: Places = field(init=False)
    _line: Line = field(init=False)
    _client: HubClient = field(init=False)
    _incarnation: int = 0
    _early: EarlyEntries | None = None

    def enter(self) -> tuple[m.AttachReply, NodeMachine]:
        """Take this worker's place; the model then holds the newest base of every fragment."""
        client = self.connect("control")
        self._client = client
        self._places = self.courier.places = Places(run_id=self.info.run_id, connect=self.info.connect)
        self._line = Line(self._places, "snapshots")
        self.state.gather()
        counters = self.state.counters()
        fragments = range(self.state.layout.fragment_count)
        initial = [base_digest(self._host(f), counters if f == 0 else ()) for f in fragments]
        reply = self._take_place(client, initial)
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
        if not fragment.url and fragment.version > fragment.snapshot_version:
            self._early = EarlyEntries(
                self.connect, self._entries_path(number, fragment.snapshot_version), fragment.snapshot_version
            )
        snapshot = self._download(number, fragment)
        theta[:] = machine.load_snapshot(number, snapshot)
        if machine.replicas[number].digest != snapshot.header.digest:
            raise ProtocolError(
                f"the snapshot of version {snapshot.header.version} has another digest than its header says"
            )
        if number == 0:
            self.state.raise_counters(snapshot.header.counters)

    def _download(self, number: int, fragment: m.FragmentState) -> Snapshot:
        version = fragment.snapshot_version
        file = Path(self.info.folder) / f"snapshot-{number}-{version}.frame"
        path = f"{m.API}/runs/{self.info.run_id}"
        outcomes = self._line.say(
            number,
            lambda client: client.download_snapshot(path, file, fragment, number),
            stop=self.courier.stop,
            what="downloading the snapshot",
        )
        self._tell_sources(number, version, outcomes)
        snapshot = snapshot_from_frame(file.read_bytes(), self.state.layout.fragment_shape(number).element_count)
        if self.courier.copy is not None:
            self.courier.copy.loaded(number, version, file)
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
        catching = CatchUp(near=max(1, self.info.job.sync.max_staleness))
        while True:
            began_s = time.monotonic()
            version = machine.replicas[fragment].version
            data = self._take_early(version)
            if not data:
                path = self._entries_path(fragment, version)
                data = self._line.say(
                    fragment, lambda client, p=path: client.fetch(p), stop=self.courier.stop, what="catching up"
                )
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

    def _entries_path(self, fragment: int, after: int) -> str:
        return f"{m.API}/runs/{self.info.run_id}/entries?fragment={fragment}&after={after}&wait_s=0"

    def _take_early(self, version: int) -> bytes:
        """The entries after this version that were fetched beside the snapshot; empty when there are none."""
        if self._early is None or self._early.after != version:
            return b""
        early, self._early = self._early, None
        return early.take(self.courier.stop)

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

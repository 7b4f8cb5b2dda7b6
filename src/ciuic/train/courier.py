"""What moves between a worker and the hub, each on its own thread and connection, so that training never waits for it.

pusher   frames out, acknowledged, repeated until an answer comes
puller   entries in, by long poll, one per fragment
control  leases and reports
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ciuic.errors import (
    CiuicError,
    FrameError,
    MovedError,
    ProtocolError,
    RunFailedError,
    StorageError,
    UnreachableError,
)
from ciuic.ledger.entry import Entry, Push, entry_from_frame
from ciuic.ledger.frame import split_frames
from ciuic.ledger.intervals import Range
from ciuic.net import messages as m
from ciuic.net.client import HubClient, backoff_s, retrying
from ciuic.net.places import DAMAGED_LIMIT, Line, Places
from ciuic.net.tls import Purpose
from ciuic.train.ledger_copy import LedgerRecorder

LONG_POLL_S = 20.0
T = TypeVar("T")
_log = logging.getLogger("ciuic.train")


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The hub answered a push."""

    fragment: int
    sequence: int
    reply: m.PushReply
    ranges: tuple[Range, ...] = ()
    """Samples that the push reported."""


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """The next entry of its fragment."""

    entry: Entry
    at_s: float
    """perf_counter at arrival."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A thread gave up: the worker must end with this error."""

    error: CiuicError


Item = Answered | Arrived | Failed


@dataclass(kw_only=True)
class Courier:
    """Threads of one worker. Items for the training thread come out of `arrivals`."""

    connect: Callable[[Purpose], HubClient]
    run_id: str
    places: Places | None = None
    """Where the fragments are; None: all at the hub."""
    copy: LedgerRecorder | None = None
    """Keeps every entry on this node's disk."""
    stop: threading.Event = field(default_factory=threading.Event)
    arrivals: "queue.Queue[Item]" = field(default_factory=queue.Queue)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Thread processor time per thread."""
    _outbox: "queue.Queue[Push]" = field(default_factory=queue.Queue)
    _outboxes: "dict[int, queue.Queue[Push]]" = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    _clients: list[HubClient] = field(default_factory=list)
    _lines: dict[str, Line] = field(default_factory=dict)

    def start(self, versions: list[int]) -> None:
        """Pull the entries after `versions` (per fragment) and push what is sent."""
        self._thread("pusher", lambda client: self._push_loop(client, self._outbox))
        for fragment, version in enumerate(versions):
            self._thread(f"puller-{fragment}", lambda c, f=fragment, v=version: self._pull_loop(c, f, v))

    def send(self, push: Push) -> None:
        """Hand over a push; its answer arrives later. With shards each fragment has a pusher: one may be away."""
        fragment = push.header.fragment
        if self.places is None or not any(self.places.urls):
            self._outbox.put(push)
            return
        if fragment not in self._outboxes:
            outbox = self._outboxes[fragment] = queue.Queue()
            self._thread(f"pusher-{fragment}", lambda client: self._push_loop(client, outbox))
        self._outboxes[fragment].put(push)

    def control(self, name: str, loop: Callable[[HubClient], None]) -> None:
        """Run another loop on a thread and connection of its own."""
        self._thread(name, loop, "control")

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop all threads; a long poll is interrupted."""
        self.stop.set()
        for client in self._clients:
            client.interrupt()
        for thread in self._threads:
            thread.join(timeout_s)
        if self.copy is not None:
            self.copy.close()

    def _thread(self, name: str, loop: Callable[[HubClient], None], purpose: Purpose = "updates") -> None:
        client = self.connect(purpose)
        self._clients.append(client)

        def body() -> None:
            try:
                loop(client)
            except UnreachableError as error:
                if not self.stop.is_set():
                    self.arrivals.put(Failed(error=error))
            except CiuicError as error:
                self.arrivals.put(Failed(error=error))
            except Exception as error:  # noqa: BLE001 - a thread that ends unnoticed would stall the run for ever
                _log.exception("the %s thread crashed", name)
                self.arrivals.put(Failed(error=RunFailedError(f"the {name} thread crashed", cause=repr(error))))
            finally:
                client.close()
                if (line := self._lines.pop(threading.current_thread().name, None)) is not None:
                    line.close()

        thread = threading.Thread(target=body, name=f"ciuic-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- pushing

    def _push_loop(self, client: HubClient, outbox: "queue.Queue[Push]") -> None:
        while not self.stop.is_set():
            try:
                push = outbox.get(timeout=0.2)
            except queue.Empty:
                continue
            header = push.header
            _log.debug("push %d of fragment %d: sending", header.sequence, header.fragment)
            reply = self._deliver(client, push)
            _log.debug("push %d of fragment %d: %s", header.sequence, header.fragment, reply.status)
            self.arrivals.put(
                Answered(fragment=header.fragment, sequence=header.sequence, reply=reply, ranges=header.ranges)
            )
            self.cpu_s[threading.current_thread().name] = time.thread_time() + client.fan.cpu_s

    def _deliver(self, client: HubClient, push: Push) -> m.PushReply:
        frame, fragment = push.to_frame(), push.header.fragment
        _log.debug("push %d of fragment %d: %d bytes", push.header.sequence, fragment, len(frame))
        path = f"{m.API}/runs/{self.run_id}"
        return self._say(client, fragment, lambda c: c.push(path, frame, fragment), "sending a push")

    def _say(self, client: HubClient, fragment: int, call: Callable[[HubClient], T], what: str) -> T:
        """At the fragment's place, again and again; `client` is this thread's connection to the hub."""
        places = self.places
        try:
            if places is None or not places.url(fragment):
                return persistently(lambda: call(client), stop=self.stop, what=what)
        except MovedError:
            if places is None:
                raise
            places.refresh()
        return self._line(places).say(fragment, call, stop=self.stop, what=what)

    def _line(self, places: Places) -> Line:
        """This thread's connections to shards."""
        name = threading.current_thread().name
        if name not in self._lines:
            self._lines[name] = Line(places, "updates", self._clients.append)
        return self._lines[name]

    # ---- pulling

    def _pull_loop(self, client: HubClient, fragment: int, version: int) -> None:
        while not self.stop.is_set():
            path = f"{m.API}/runs/{self.run_id}/entries?fragment={fragment}&after={version}&wait_s={LONG_POLL_S:g}"
            data = self._say(
                client, fragment, lambda c, p=path: c.fetch(p, timeout_s=LONG_POLL_S + 15), "waiting for entries"
            )
            at_s = time.perf_counter()
            _log.debug("%d bytes of entries after version %d of fragment %d", len(data), version, fragment)
            for frame in split_frames(data, "entry"):
                entry = entry_from_frame(frame)
                if entry.header.version != version + 1:
                    raise ProtocolError(f"entry {entry.header.version} came after version {version}")
                version += 1
                if self.copy is not None:
                    self.copy.entry(fragment, frame)
                self.arrivals.put(Arrived(entry=entry, at_s=at_s))
            self.cpu_s[f"puller-{fragment}"] = time.thread_time()


def persistently(call: Callable[[], T], *, stop: threading.Event, what: str) -> T:
    """Repeat while the hub is unreachable, its disk is full or the message was damaged on the way: all may pass."""
    failures = 0
    while True:
        try:
            return retrying(call, stop=stop, what=what)
        except (StorageError, FrameError) as error:
            failures += 1
            if failures == 1:
                _log.warning("%s: %s; trying again", what, error)
            if isinstance(error, FrameError) and failures >= DAMAGED_LIMIT:
                raise  # not an accident on the way
            if stop.wait(backoff_s(failures)):
                raise


def post(client: HubClient, run_id: str, what: str, message: msgspec.Struct, reply_type: type[Any] = m.Ok) -> Any:
    """POST one control message of a run."""
    return client.call("POST", f"{m.API}/runs/{run_id}/{what}", message, reply_type)

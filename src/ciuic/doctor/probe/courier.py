"""The probe's own thread: carries messages to the collector, beats, answers questions. It never makes the run wait."""

import contextlib
import os
import queue
import select
import socket
import threading
import time
from typing import Any

from ciuic.doctor.record import (
    DROPPED,
    PROBE_FAILED,
    Beat,
    Bye,
    Frames,
    FromRank,
    Hello,
    Notice,
    Question,
    Schedule,
    to_frame,
    to_rank,
)
from ciuic.doctor.record import Answer as AnswerMessage
from ciuic.errors import FrameError

BEAT_S = 0.5
QUEUE_MAX = 1024
"""Messages that wait for the line; more are dropped and counted."""
CONNECT_S = 2.0
RETRY_S = 1.0
LAST_WORDS_S = 2.0
"""How long the end of the program waits for the last messages to leave."""


class Courier:
    """`start` with the probe; `send` from any thread; `close` at the end."""

    def __init__(self, address: tuple[str, int], token: str, *, rank: int, world: int) -> None:
        self._address, self._token = address, token
        self._rank, self._world = rank, world
        self._queue: queue.Queue[FromRank | threading.Event] = queue.Queue(QUEUE_MAX)
        self.connected = False
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        os.set_blocking(self._wake_r, False)
        self._closing = threading.Event()
        self._until_s = 0.0
        self._probe: Any = None
        self._thread = threading.Thread(target=self._serve, name="ciuic-doctor", daemon=True)
        self._frames = Frames()
        self.dropped = 0
        self._pid = os.getpid()
        self.sent_bytes = 0
        self.spent_s = 0.0
        """Processor time of this thread so far."""

    def start(self, probe: Any) -> None:
        """Begin to carry; `probe` gives beats and answers (see Probe)."""
        self._probe = probe
        self._thread.start()

    def send(self, message: FromRank) -> None:
        """Never blocks: a message that finds the queue full is dropped. In a forked child nobody carries it, and the
        queue's lock may have been held when it was forked."""
        if os.getpid() != self._pid:
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self.dropped += 1
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"x")

    def flush(self, wait_s: float) -> None:
        """Give what was sent so far a moment to leave: what comes next may end the process."""
        if os.getpid() != self._pid or not self.connected or threading.current_thread() is self._thread:
            return
        left = threading.Event()
        with contextlib.suppress(queue.Full, OSError):
            self._queue.put_nowait(left)
            os.write(self._wake_w, b"x")
            left.wait(wait_s)

    def close(self, how: str = "end", **facts: Any) -> None:
        """Last words; waits a bounded time until they have left."""
        if os.getpid() != self._pid or self._closing.is_set() or not self._thread.is_alive():
            return
        step = getattr(self._probe, "step", 0)
        self.send(Bye(rank=self._rank, step=step, how=how, facts=facts, time_s=time.time()))
        self._until_s = time.monotonic() + LAST_WORDS_S
        self._closing.set()
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"x")
        self._thread.join(LAST_WORDS_S)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            try:
                with socket.create_connection(self._address, timeout=CONNECT_S) as link:
                    self._talk(link)
            except (OSError, FrameError):
                self.connected = False
                if self._closing.is_set():
                    return
                self._closing.wait(RETRY_S)

    def _talk(self, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(CONNECT_S)
        self._frames = Frames()
        hello = Hello(token=self._token, rank=self._rank, world=self._world, host=socket.gethostname(), pid=os.getpid())
        self._put(link, hello)
        self.connected = True
        beat_at = 0.0
        while True:
            ready, _, _ = select.select([link, self._wake_r], [], [], self._patience_s(beat_at))
            if self._wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            self._drain(link)
            if self._closing.is_set() and time.monotonic() >= self._until_s:
                return
            if (
                link in ready
            ):  # also after the last words: the collector may have questions, and ends the connection itself
                self._hear(link)
            if time.monotonic() >= beat_at:
                self._put(link, self._beat())
                beat_at = time.monotonic() + BEAT_S
                self.spent_s = time.thread_time()

    def _patience_s(self, beat_at: float) -> float:
        until_s = min(beat_at, self._until_s) if self._closing.is_set() else beat_at
        return max(0.0, until_s - time.monotonic())

    def _drain(self, link: socket.socket) -> None:
        while True:
            try:
                message = self._queue.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, threading.Event):
                message.set()
            else:
                self._put(link, message)

    def _put(self, link: socket.socket, message: FromRank) -> None:
        try:
            frame = to_frame(message)
        except FrameError as error:  # the others must get out all the same
            self.dropped += 1
            kind = type(message).__name__.lower()
            facts = {"part": "courier", "event": kind, "error": f"{error.message}: {error.cause}"[:300]}
            frame = to_frame(Notice(rank=self._rank, step=0, kind=PROBE_FAILED, facts=facts))
        try:
            link.sendall(frame)
        except OSError:
            self.dropped += not isinstance(message, Beat | Hello)
            raise
        self.sent_bytes += len(frame)

    def _hear(self, link: socket.socket) -> None:
        data = link.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the collector has gone")
        for body in self._frames.feed(data):
            message = to_rank(body)
            if isinstance(message, Schedule):
                self._probe.sampler.follow(message)
            elif isinstance(message, Question):
                facts = self._probe.answer(message)
                self._put(link, AnswerMessage(rank=self._rank, question=message.number, facts=facts))

    def _beat(self) -> Beat:
        probe = self._probe
        facts = probe.gather("tick")
        if self.dropped:
            facts[DROPPED] = self.dropped
        return Beat(
            rank=self._rank,
            step=probe.step,
            time_s=time.time(),
            phase=probe.phase,
            phase_s=time.monotonic() - probe.phase_since_s,
            facts=facts,
        )

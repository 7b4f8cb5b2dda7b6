"""One direction of one relayed connection: read, wait for the lane, travel, arrive, write."""

import asyncio
import contextlib
import socket
from collections import deque
from enum import Enum
from typing import Protocol

from ciuic.lab.links import Lane, LinkClock, LinkTimer

_READ_BYTES = 64 * 1024


class End(Enum):
    """What ends a direction. It travels behind the bytes before it."""

    FINISHED = "finished"
    RESET = "reset"


class PipeOwner(Protocol):
    """The connection a pipe belongs to, as the pipe sees it."""

    def on_read(self, pipe: "Pipe", data: bytes) -> None:
        """These bytes left the sender; they have not arrived yet."""
        ...

    def on_passed(self, pipe: "Pipe", count: int) -> None:
        """So many bytes were handed to the receiver."""
        ...

    def on_end(self, pipe: "Pipe", end: End) -> None:
        """The end of this direction arrived; the pipe does nothing any more."""
        ...

    def on_write_error(self, pipe: "Pipe") -> None:
        """The receiver is gone; the pipe does nothing any more."""
        ...


class Pipe:
    """Moves bytes in order from one socket to another, through a lane and its delay.

    Never holds more than the lane's window; while it is full, the sender's own socket fills up and blocks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: LinkClock, lane: Lane, owner: PipeOwner) -> None:
        self._loop = loop
        self._clock = clock
        self._lane = lane
        self._owner = owner
        self._source: socket.socket | None = None
        self._target: socket.socket | None = None
        self._queue: deque[tuple[float, memoryview | End]] = deque()
        self._taken: list[memoryview | End] = []
        self._flight: deque[tuple[float, list[memoryview | End]]] = deque()
        self._arrived: deque[memoryview | End] = deque()
        self._held_bytes = 0
        self._arrival_timer: LinkTimer | None = None
        self._last_arrival = 0.0
        self._opened_at: float | None = None
        self._reading = False
        self._writing = False
        self._source_ended = False
        self.done = False

    # ---- set-up and end ----

    def read_from(self, source: socket.socket) -> None:
        self._source = source
        self._resume_reading()

    def write_to(self, target: socket.socket) -> None:
        self._target = target
        self._write()

    def open(self) -> None:
        """From now on bytes may leave: the connection is set up."""
        self._opened_at = self._clock.now()
        if self.waiting:
            self._lane.offer(self)

    def send_end(self, end: End) -> None:
        """End this direction as if its sender had; what it sent before still travels."""
        if not self._source_ended:
            self._source_ended = True
            self._pause_reading()
            self._enqueue(end)

    def close(self) -> None:
        """Drop everything; the sockets are the owner's to close."""
        self.done = True
        self._pause_reading()
        self._pause_writing()
        self._lane.withdraw(self)
        if self._arrival_timer is not None:
            self._arrival_timer.cancel()
        self._queue.clear()
        self._flight.clear()
        self._arrived.clear()

    # ---- from the sender into the queue ----

    def _on_readable(self) -> None:
        room = self._lane.window_bytes - self._held_bytes
        if room <= 0 or self._source is None:
            self._pause_reading()
            return
        try:
            data = self._source.recv(min(room, _READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self.send_end(End.RESET)
            return
        if not data:
            self.send_end(End.FINISHED)
            return
        self._held_bytes += len(data)
        self._owner.on_read(self, data)
        self._enqueue(memoryview(data))

    def _enqueue(self, piece: memoryview | End) -> None:
        self._queue.append((self._clock.now(), piece))
        if self._opened_at is not None:
            self._lane.offer(self)

    # ---- through the lane (the Sender protocol) ----

    @property
    def waiting(self) -> bool:
        return bool(self._queue)

    def take(self, limit_bytes: int) -> tuple[int, float]:
        size, ready_at = 0, self._opened_at or 0.0
        while self._queue and size < limit_bytes:
            read_at, piece = self._queue.popleft()
            ready_at = max(ready_at, read_at)
            if isinstance(piece, memoryview):
                room = limit_bytes - size
                if len(piece) > room:
                    self._queue.appendleft((read_at, piece[room:]))
                    piece = piece[:room]
                size += len(piece)
            self._taken.append(piece)
        return size, ready_at

    def launch(self, arrive_at: float) -> None:
        self._last_arrival = max(self._last_arrival, arrive_at)
        self._flight.append((self._last_arrival, self._taken))
        self._taken = []
        if self._arrival_timer is None:
            self._arrival_timer = self._clock.call_at(self._flight[0][0], self._arrive)

    # ---- out at the other end ----

    def _arrive(self) -> None:
        self._arrival_timer = None
        now = self._clock.now()
        while self._flight and self._flight[0][0] <= now:
            self._arrived.extend(self._flight.popleft()[1])
        if self._flight:
            self._arrival_timer = self._clock.call_at(self._flight[0][0], self._arrive)
        self._write()

    def _write(self) -> None:
        """Hand what arrived to the receiver; what it does not take waits until it does."""
        if self._target is None:
            return
        while self._arrived and not self.done:
            piece = self._arrived.popleft()
            if isinstance(piece, End):
                self._finish(self._target, piece)
                return
            try:
                count = self._target.send(piece)
            except BlockingIOError:
                count = 0
            except OSError:
                self.close()
                self._owner.on_write_error(self)
                return
            self._held_bytes -= count
            self._owner.on_passed(self, count)
            if count < len(piece):
                self._arrived.appendleft(piece[count:])
                self._resume_writing()
                return
        self._pause_writing()
        self._resume_reading()

    def _finish(self, target: socket.socket, end: End) -> None:
        self.close()
        if end is End.FINISHED:
            with contextlib.suppress(OSError):  # the receiver may be gone already
                target.shutdown(socket.SHUT_WR)
        self._owner.on_end(self, end)

    # ---- readiness ----

    def _resume_reading(self) -> None:
        wanted = not (self._reading or self._source_ended or self.done)
        if wanted and self._source is not None and self._held_bytes < self._lane.window_bytes:
            self._loop.add_reader(self._source, self._on_readable)
            self._reading = True

    def _pause_reading(self) -> None:
        if self._reading and self._source is not None:
            self._loop.remove_reader(self._source)
            self._reading = False

    def _resume_writing(self) -> None:
        if not self._writing and self._target is not None:
            self._loop.add_writer(self._target, self._write)
            self._writing = True

    def _pause_writing(self) -> None:
        if self._writing and self._target is not None:
            self._loop.remove_writer(self._target)
            self._writing = False

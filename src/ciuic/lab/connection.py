"""One relayed connection: its set-up, its two pipes, its purpose and its end."""

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from ciuic.lab.hello import PurposeReader
from ciuic.lab.links import Lane, LinkClock, LinkTimer
from ciuic.lab.pipe import End, Pipe

BUFFER_BYTES = 256 * 1024
"""Kernel receive buffer per socket: enough for smooth flow on loopback, small beside the link's own window."""


@dataclass(frozen=True, kw_only=True)
class LinkParts:
    """What all connections of a link share."""

    loop: asyncio.AbstractEventLoop
    clock: LinkClock
    up: Lane
    down: Lane
    one_way_delay_s: float
    target: tuple[str, int]


class Connection:
    """Relays between an accepted client and the target.

    Loopback sets up a connection in no time; a real one needs a round trip before the client may send. Therefore the
    target is called after one one-way delay, the client's bytes leave after two, the server's own after three.
    """

    def __init__(self, parts: LinkParts, client: socket.socket, closed: Callable[["Connection"], None]) -> None:
        self._parts = parts
        self._client = client
        self._server: socket.socket | None = None
        self._closed = closed
        self._purpose = PurposeReader()
        self._timers: list[LinkTimer] = []
        self.ended = False
        self.up = Pipe(parts.loop, parts.clock, parts.up, self)
        self.down = Pipe(parts.loop, parts.clock, parts.down, self)
        self.up_bytes = 0
        self.down_bytes = 0
        prepare(client)
        self._set_up()

    @property
    def purpose(self) -> str:
        """`other` also until the client's first bytes have told it."""
        return self._purpose.purpose or "other"

    def abort(self) -> None:
        """Reset both sides at once."""
        for each in (self._client, self._server):
            if each is not None:
                with contextlib.suppress(OSError):  # a socket that never connected has nothing to linger
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close()

    # ---- set-up ----

    def _set_up(self) -> None:
        start, delay_s = self._parts.clock.now(), self._parts.one_way_delay_s
        self.up.read_from(self._client)
        self.down.write_to(self._client)
        for trips, call in ((1, self._call_target), (2, self.up.open), (3, self.down.open)):
            self._timers.append(self._parts.clock.call_at(start + trips * delay_s, call))

    def _call_target(self) -> None:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._server = server
        prepare(server)
        if server.connect_ex(self._parts.target) not in (0, errno.EINPROGRESS):
            self._refuse()
            return
        self._parts.loop.add_writer(server, self._on_called)

    def _on_called(self) -> None:
        server = self._server
        if server is None:
            return
        self._parts.loop.remove_writer(server)
        if server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
            self._refuse()
            return
        self.up.write_to(server)
        self.down.read_from(server)

    def _refuse(self) -> None:
        """The client learns it as it would from afar: after the way back."""
        due = self._parts.clock.now() + self._parts.one_way_delay_s
        self._timers.append(self._parts.clock.call_at(due, self.abort))

    # ---- what the pipes tell ----

    def on_read(self, pipe: Pipe, data: bytes) -> None:
        if pipe is self.up:
            self._purpose.feed(data)

    def on_passed(self, pipe: Pipe, count: int) -> None:
        if pipe is self.up:
            self.up_bytes += count
        else:
            self.down_bytes += count

    def on_end(self, pipe: Pipe, end: End) -> None:
        if end is End.RESET:
            self.abort()
        elif self.up.done and self.down.done:
            self._close()

    def on_write_error(self, pipe: Pipe) -> None:
        other = self.down if pipe is self.up else self.up
        if other.done:
            self.abort()
        else:
            other.send_end(End.RESET)

    # ---- end ----

    def _close(self) -> None:
        if self.ended:
            return
        self.ended = True
        for timer in self._timers:
            timer.cancel()
        self.up.close()
        self.down.close()
        if self._server is not None:
            self._parts.loop.remove_writer(self._server)
            self._server.close()
        self._client.close()
        self._closed(self)


def prepare(sock: socket.socket) -> None:
    """Non-blocking, small packets at once, a small kernel buffer."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)

"""Accepts the connections of a port: who may begin a TLS handshake is decided before it costs anything.

asyncio's own server would begin a handshake with everybody, for a minute each. Here a connection is counted by its
address as soon as it is there, a handshake has `HANDSHAKE_S`, and what is beyond the limits is closed at once.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from ciuic.hub.access.limits import Limits
from ciuic.hub.protocol import PeerProtocol

HANDSHAKE_S = 20.0
SHUTDOWN_S = 5.0
"""How long the other side may take to say goodbye, before the connection is just cut."""
AT_ONCE = 64
"""Connections accepted before others are served."""
NO_FILES_PAUSE_S = 0.5
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door:
    """One listening socket. `close` and `wait_closed` are those of an asyncio server."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[str], PeerProtocol],
        limits: Limits,
    ) -> None:
        """`make_protocol(address)` makes what speaks with a caller. The listener must not block."""
        self._listener, self._context = listener, context
        self._make_protocol, self._limits = make_protocol, limits
        self._loop = asyncio.get_running_loop()
        self._greeting: set[asyncio.Task[None]] = set()
        self._later: asyncio.TimerHandle | None = None
        self._is_closed = False

    def open(self) -> None:
        """Begin to accept."""
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more; handshakes that are not finished are given up."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener.fileno())
        if self._later is not None:
            self._later.cancel()
        for task in self._greeting:
            task.cancel()

    async def wait_closed(self) -> None:
        """Until no handshake is on its way any more."""
        if self._greeting:
            await asyncio.wait(set(self._greeting))

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                self._loop.remove_reader(self._listener.fileno())  # else this would be asked for over and over
                self._later = self._loop.call_later(NO_FILES_PAUSE_S, self.open)
                return
            self._welcome(connection, str(peer[0]))

    def _welcome(self, connection: socket.socket, address: str) -> None:
        if self._limits.arrive(address, self._loop.time()):
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._greet(connection, address))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: socket.socket, address: str) -> None:
        protocol = self._make_protocol(address)
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:  # with ssl's errors and time-outs: it was no caller of ours
            connection.close()
        finally:
            if not protocol.has_met:
                self._limits.give_up(address, self._loop.time())
                with suppress(OSError):
                    connection.close()

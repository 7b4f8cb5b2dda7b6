"""One listening TLS port: the socket, uvicorn on it, the folder's lock. The same for a hub and a shard."""

import asyncio
import contextlib
import fcntl
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

import structlog
import uvicorn
from starlette.types import ASGIApp

from ciuic.errors import ConflictError, UsageError
from ciuic.hub.access.door import Door
from ciuic.hub.access.limits import Limits
from ciuic.hub.api.events import Board
from ciuic.hub.protocol import PeerProtocol
from ciuic.net.tls import Identity, server_context

KEEP_ALIVE_S = 130
"""Longer than any pause of a node: a connection that is cut costs a TLS handshake over a long link."""
LAST_ANSWERS_S = 1.0
MOST_FILES = 65_536
BEFORE_CUT_S = 1.0
"""A caller whose certificate was revoked still gets the answer that says so."""


@dataclass(frozen=True, kw_only=True)
class ServerFiles:
    """With what a port proves who it is, and whose callers it believes."""

    cert: Path
    key: Path
    authority_pem: bytes


class PortServer(uvicorn.Server):
    """uvicorn behind a `Door`, without its own signal handling (it would end the process by the signal).

    Held answers are released in the end.
    """

    def __init__(self, app: ASGIApp, board: Board, files: ServerFiles, limits: Limits | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=PeerProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        config.load()
        self._context = server_context(files.cert, files.key, files.authority_pem)
        super().__init__(config)
        self._board, self._limits = board, limits or Limits()
        self._doors: list[Door] = []
        self.when_started: Callable[[], Awaitable[None]] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections from `sockets`."""
        await self.lifespan.startup()
        self.servers = []
        allow_many_files()
        self._doors = [Door(one, self._context, self._speaker, self._limits) for one in sockets or []]
        for door in self._doors:
            door.open()
        self.started = True
        if self.when_started is not None:
            await self.when_started()

    def _speaker(self, address: str) -> PeerProtocol:
        protocol = PeerProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        protocol.limits, protocol.address = self._limits, address
        return protocol

    def use_certificate(self, cert: Path, key: Path) -> None:
        """New handshakes see this certificate; open connections go on. In the loop's thread. Raises OSError."""
        self._context.load_cert_chain(cert, key)

    def cut(self, is_refused: Callable[[Identity], bool]) -> None:
        """End the open connections of these callers, once they had time to read why. In the loop's thread."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, PeerProtocol) and connection.peer.key and is_refused(connection.peer.identity()):
                connection.loop.call_later(BEFORE_CUT_S, connection.transport.abort)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let held answers go out, then cut whatever is still connected: nodes come back by themselves."""
        for door in self._doors:
            door.close()
        self._board.close()
        connections = self.server_state.connections
        for connection in list(connections):
            connection.shutdown()
        for _ in range(100):
            if not self.server_state.tasks and not any(has_unsent(one.transport) for one in connections):
                break
            await asyncio.sleep(LAST_ANSWERS_S / 100)
        for connection in list(connections):
            connection.transport.abort()
        for door in self._doors:
            await door.wait_closed()
        await super().shutdown(sockets)


def has_unsent(transport: asyncio.Transport) -> bool:
    """Whether bytes wait to go out."""
    try:
        return transport.get_write_buffer_size() > 0
    except AttributeError:  # asyncio's TLS transport, closed twice, has forgotten its buffer
        return False


def allow_many_files() -> None:
    """Each connection is one: `MOST_FILES`, or as many as the system lets this process have."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class _PatientError:
    """Standard error, which may lead to a file on the same full disk: a line that cannot be written is lost, and
    whoever wanted to say it goes on.
    """

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def prepare_log() -> None:
    """Warnings and errors as key=value lines on stderr."""
    structlog.configure(
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(30),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _PatientError())),
    )


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Generator[None]:
    """At most one hub (or shard) per folder; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConflictError(
                f"another {what} is running in {folder}",
                cause="it holds the lock of this folder",
                next="stop it first, or choose another folder with CIUIC_HOME",
            ) from error
        yield


@contextlib.contextmanager
def listening(host: str, port: int, what: str) -> Generator[socket.socket]:
    """A socket that takes connections. Raises UsageError when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio switches Nagle's delay (40 ms per answer) off only for sockets that name it.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError, AttributeError):  # better on long lossy links, where the kernel has it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        try:
            listener.bind((host, port))
            listener.listen(256)
        except OSError as error:
            raise UsageError(
                f"the {what} cannot listen on {host} port {port}",
                cause=(error.strerror or str(error)).lower(),
                next="choose another port with --port, or stop what uses this one",
            ) from error
        listener.setblocking(False)
        yield listener

"""One listening TLS port: the socket, uvicorn on it, the folder's lock. The same for a hub and a shard."""

import asyncio
import contextlib
import fcntl
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn
from starlette.types import ASGIApp

from ciuic.errors import ConflictError, UsageError
from ciuic.hub.events import Board
from ciuic.hub.protocol import PeerProtocol
from ciuic.net.tls import server_context

KEEP_ALIVE_S = 130
"""Longer than any pause of a node: a connection that is cut costs a TLS handshake over a long link."""
MOST_CONNECTIONS = 1000
LAST_ANSWERS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ServerFiles:
    """With what a port proves who it is, and whose callers it believes."""

    cert: Path
    key: Path
    authority_pem: bytes


class PortServer(uvicorn.Server):
    """uvicorn without its own signal handling (it would end the process by the signal), releasing held answers."""

    def __init__(self, app: ASGIApp, board: Board, files: ServerFiles) -> None:
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
            limit_concurrency=MOST_CONNECTIONS,
        )
        config.load()
        config.ssl = server_context(files.cert, files.key, files.authority_pem)
        super().__init__(config)
        self._board = board
        self.when_started: Callable[[], Awaitable[None]] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.when_started is not None:
            await self.when_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let held answers go out, then cut whatever is still connected: nodes come back by themselves."""
        for server in self.servers:
            server.close()
        self._board.close()
        connections = self.server_state.connections
        for connection in list(connections):
            connection.shutdown()
        for _ in range(100):
            if not self.server_state.tasks and not any(one.transport.get_write_buffer_size() for one in connections):
                break
            await asyncio.sleep(LAST_ANSWERS_S / 100)
        for connection in list(connections):
            connection.transport.abort()
        await super().shutdown(sockets)


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
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

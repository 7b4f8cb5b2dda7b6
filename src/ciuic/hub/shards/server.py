"""`ciuic hub shard`: a process that serves fragments of runs for its hub, until it is told to stop.

It prints one line when it serves:

    shard s1 ready at https://host:port for the hub at https://host:port
"""

import asyncio
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from ciuic.hub.access.limits import Limits
from ciuic.hub.api.endpoints import Gate, not_found
from ciuic.hub.api.events import Board, run_topic
from ciuic.hub.port import PortServer, ServerFiles, listening, locked, prepare_log
from ciuic.hub.shards.api import ShardDesk, ShardNodeApi
from ciuic.hub.shards.config import ShardConfig, ShardIdentity, host_of, settle_identity
from ciuic.hub.shards.host import ShardHost, Ties
from ciuic.hub.shards.link import ShardLink


def serve_shard(config: ShardConfig, *, out: TextIO | None = None) -> int:
    """Run a shard until SIGTERM or SIGINT; returns the exit code.

    Raises UsageError (address not usable), ConflictError (the folder is used), TokenError, StorageError.
    """
    prepare_log()
    with locked(config.folder, "shard"), listening(config.host, config.port, "shard") as listener:
        url = _url(config, listener.getsockname()[1])
        identity = settle_identity(config, host_of(url))
        link = ShardLink(identity, url)
        board = Board()

        def wake(run_id: str) -> None:
            board.notify(run_topic(run_id))
            link.wake()

        ties = Ties(clock=time.monotonic, run_of=link.run_of, fetch=link.fetch, wake=wake, spawn=_spawn)
        host = ShardHost(identity.name, config.folder / "runs", ties)

        def started() -> None:
            link.start(host)
            (out or sys.stdout).write(f"shard {identity.name} ready at {url} for the hub at {identity.hub_url}\n")
            (out or sys.stdout).flush()

        asyncio.run(_run(ShardDesk(host=host, link=link, board=board), identity, listener, started))
        link.stop()
        host.close()
    return 0


def _spawn(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="shard-fetch", daemon=True).start()


def _url(config: ShardConfig, port: int) -> str:
    if config.url:
        return config.url
    everywhere = config.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
    host = socket.gethostname() if everywhere else f"[{config.host}]" if ":" in config.host else config.host
    return f"https://{host}:{port}"


def _in_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(work)


async def _run(desk: ShardDesk, identity: ShardIdentity, listener: socket.socket, started: Callable[[], None]) -> None:
    app = Starlette(routes=ShardNodeApi(desk).routes(), exception_handlers={HTTPException: not_found})
    files = ServerFiles(cert=identity.cert, key=identity.key, authority_pem=identity.authority.read_bytes())
    limits = Limits()
    server = PortServer(Gate(app, frozenset(), desk, limits), desk.board, files, limits)
    loop = asyncio.get_running_loop()
    desk.board.attach(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    desk.link.on_renewed = lambda: _in_loop(loop, lambda: server.use_certificate(identity.cert, identity.key))
    server.when_started = lambda: desk.short(started)
    try:
        await server.serve(sockets=[listener])
    finally:
        desk.board.close()
        desk.close()

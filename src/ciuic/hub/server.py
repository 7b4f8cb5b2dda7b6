"""The hub's one port: uvicorn with TLS, the endpoints, a clock that ticks, and a clean end.

`serve` blocks until SIGTERM or SIGINT. It prints one line when it is ready:

    hub ready at https://host:port  authority <first 16 characters of its fingerprint>
"""

import asyncio
import getpass
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from ciuic import __version__
from ciuic.hub.access.auth import HubFiles, prepare_folder, prepare_operator
from ciuic.hub.access.limits import Limits
from ciuic.hub.access.rotation import Rotation
from ciuic.hub.api.access import AccessApi
from ciuic.hub.api.endpoints import Desk, Gate, not_found
from ciuic.hub.api.events import SHARDS, run_topic
from ciuic.hub.api.keeping import KeepingApi
from ciuic.hub.api.node import PUBLIC, NodeApi
from ciuic.hub.api.operator import OperatorApi
from ciuic.hub.api.run import RunApi
from ciuic.hub.api.shard import ShardApi
from ciuic.hub.api.store import StoreApi
from ciuic.hub.api.view import HubFacts, StateSource, ViewApi
from ciuic.hub.config import HubConfig
from ciuic.hub.core import Hub
from ciuic.hub.keeping.keeper import Keeping
from ciuic.hub.keeping.store import Store
from ciuic.hub.membership.records import Announce
from ciuic.hub.page.routes import page_routes
from ciuic.hub.port import PortServer, ServerFiles, listening, locked, prepare_log
from ciuic.hub.run.rounds import RunLedger
from ciuic.hub.run.shelf import OpenLedger
from ciuic.net.route import advertised_host, own_addresses
from ciuic.net.tls import write_private_file

TICK_S = 0.25
SHORTEST_TICK_S = 0.02

PageRoutes = Callable[[Desk, StateSource], list[Route]]
_log = structlog.get_logger("ciuic.hub")


def serve(
    config: HubConfig,
    *,
    open_ledger: OpenLedger = RunLedger.open,
    page: PageRoutes | None = page_routes,
    out: TextIO | None = None,
) -> int:
    """Run a hub until it is told to stop; returns the exit code.

    Raises UsageError (address not usable), ConflictError (another hub uses the folder), StorageError.
    """
    prepare_log()
    with locked(config.folder, "hub"), listening(config.host, config.port, "hub") as listener:
        host, port = _reached_at(config), listener.getsockname()[1]
        url = config.public_url or f"https://{host}:{port}"
        files = prepare_folder(config.folder, _names(config))
        local = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host  # noqa: S104 - compared, not bound
        local_url = f"https://{_bracketed(local)}:{port}"
        store = Store(config.folder / "ciuic.db", events_kept=config.events_kept, log_lines_kept=config.log_lines_kept)
        hub = Hub(config, store, files.authority, open_ledger)
        _settle_operator(hub, local_url)
        hub.open_ledgers()
        server = HubServer(hub, HubFacts(url=url, version=__version__), files, page)
        write_private_file(config.folder / "address", f"{local_url}\n".encode())

        def tell_ready() -> None:
            hub.say(hub.first_words(url))
            line = f"hub ready at {url}  authority {files.authority.fingerprint[:16]}\n"
            (out or sys.stdout).write(line)
            (out or sys.stdout).flush()

        server.keeping.start()
        asyncio.run(server.run(listener, tell_ready))
        server.keeping.stop()
        hub.say(Announce(kind="hub.stopped", text="the hub was stopped"))
        hub.stop()
    return 0


class HubServer:
    """One hub on one listening socket."""

    def __init__(self, hub: Hub, facts: HubFacts, files: HubFiles, page: PageRoutes | None) -> None:
        self.hub = hub
        self.desk = Desk(hub=hub)
        self.keeping = Keeping(hub)
        self.rotation = Rotation(files, _names(hub.config), self._use_certificate)
        self._loop: asyncio.AbstractEventLoop | None = None
        source = StateSource(self.desk, facts)
        self.routes = [
            *NodeApi(self.desk, facts.version).routes(),
            *RunApi(self.desk).routes(),
            *ShardApi(self.desk).routes(),
            *StoreApi(self.desk).routes(),
            *OperatorApi(self.desk, facts.url).routes(),
            *AccessApi(self.desk, self.rotation, facts.url).routes(),
            *KeepingApi(self.desk, self.keeping).routes(),
            *ViewApi(self.desk, source).routes(),
            *(page(self.desk, source) if page is not None else []),
        ]
        app = Starlette(routes=self.routes, exception_handlers={HTTPException: not_found})
        secrets = ServerFiles(cert=files.cert, key=files.key, authority_pem=files.authority.certificate_pem)
        limits = Limits(hub.config.limits)
        hub.gatekeeper.on_revoked = self._cut_revoked
        self._uvicorn = PortServer(Gate(app, PUBLIC, self.desk, limits), hub.board, secrets, limits)

    async def run(self, listener: socket.socket, tell_ready: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT (a second one does not wait for answers)."""
        loop = self._loop = asyncio.get_running_loop()
        self.hub.board.attach(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._uvicorn.handle_exit, number, None)
        ticking = loop.create_task(Ticker(self.desk).run())
        rotating = loop.create_task(self.rotation.keep_fresh(self.hub.board))
        try:
            self._uvicorn.when_started = lambda: self.desk.short(tell_ready)
            await self._uvicorn.serve(sockets=[listener])
        finally:
            self.hub.board.close()
            await asyncio.gather(ticking, rotating)
            self.desk.close()

    def _use_certificate(self, cert: Path, key: Path) -> None:
        self._uvicorn.use_certificate(cert, key)

    def _cut_revoked(self) -> None:
        """From any thread: whoever may speak no more is told so, and then its connections are ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._uvicorn.cut, self.hub.gatekeeper.is_revoked)
        self.hub.board.notify(SHARDS)


class Ticker:
    """Lets time pass: for the state every quarter second, for each ledger when it asks for it, at least as often.

    Each ledger has a task of its own: one that takes long does not hold up the others.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._board = desk.hub.board
        self._ledgers: dict[str, asyncio.Task[None]] = {}
        self._at_work: set[str] = set()

    async def run(self) -> None:
        """Until the hub stops."""
        while not self._board.is_closed:
            try:
                self._at_work = set(await self._desk.short(self._desk.hub.tick))
            except Exception:  # noqa: BLE001 - a clock that stops would let dead nodes live for ever
                _log.exception("tick crashed")
            self._ledgers = {run_id: task for run_id, task in self._ledgers.items() if not task.done()}
            for run_id in self._at_work - self._ledgers.keys():
                self._ledgers[run_id] = asyncio.create_task(self._tick_ledger(run_id))
            await self._board.pause(TICK_S)

    async def _tick_ledger(self, run_id: str) -> None:
        """Until the run has ended; earlier than asked for when something has happened in it."""
        while run_id in self._at_work and not self._board.is_closed:
            seen = self._board.seen(run_topic(run_id))
            try:
                wait_s = await self._desk.long(self._desk.hub.tick_run, run_id)
            except Exception:  # noqa: BLE001 - the next tick may work, and the other runs go on
                _log.exception("ledger tick crashed", run=run_id)
                wait_s = TICK_S
            await self._board.wait(run_topic(run_id), seen, min(TICK_S, max(SHORTEST_TICK_S, wait_s)))


# ---- addresses -----------------------------------------------------------------------------------------------------


def _names(config: HubConfig) -> list[str]:
    """Everything the certificate must hold."""
    public = urlsplit(config.public_url).hostname or ""
    wildcard = config.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
    hosts = own_addresses() if wildcard else [config.host]
    return [name for name in dict.fromkeys([*config.names, public, *hosts]) if name]


def _reached_at(config: HubConfig) -> str:
    """The host in the hub's own URL: the first name given, else the address, else this machine's name, if it is one."""
    if config.names:
        return _bracketed(config.names[0])
    return _bracketed(advertised_host() if config.host in ("0.0.0.0", "::") else config.host)  # noqa: S104


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _settle_operator(hub: Hub, url: str) -> None:
    """The local operator's certificate, in the hub's records too. Who may use this folder may be the operator."""
    keeper, folder = hub.gatekeeper, hub.config.home / "operator"
    pem = prepare_operator(folder, hub.authority, url, name=_operator_name(), is_accepted=keeper.accepts)
    keeper.note(pem)


def _operator_name() -> str:
    try:
        return getpass.getuser()[:40] or "operator"
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"

"""Endpoints for what a hub keeps: backup, rebuilding, retention, removal; and committed samples for nodes' copies."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ciuic.errors import ConflictError, StorageError
from ciuic.hub.access.auth import NODES, OPERATORS
from ciuic.hub.api.endpoints import Call, Desk, reply
from ciuic.hub.keeping.backup import Capture
from ciuic.hub.keeping.keeper import Keeping, check_yes
from ciuic.hub.run.shelf import Copied


class KeepingApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: Desk, keeping: Keeping) -> None:
        self._desk, self._keeping = desk, keeping

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        route = self._desk.route
        return [
            route("GET", "/v1/backup", self.backup, roles=OPERATORS),
            route("PUT", "/v1/rebuild", self.rebuild, roles=OPERATORS, limit_bytes=0),
            route("POST", "/v1/gc", self.collect, roles=OPERATORS),
            route("DELETE", "/v1/runs/{run}", self.remove, roles=OPERATORS),
            route("GET", "/v1/runs/{run}/committed", self.committed, roles=NODES | OPERATORS),
        ]

    async def backup(self, call: Call) -> Response:
        """The archive as it is made."""
        with_authority = bool(call.number("authority", 1))
        found = await self._desk.long(self._keeping.backup, call.name, with_authority=with_authority)
        return BackupResponse(found, self._desk.bulk)

    async def rebuild(self, call: Call) -> Response:
        """A run from an exported copy of its ledger."""
        path, limit_bytes = await self._desk.long(self._keeping.upload_place)
        try:
            with path.open("xb") as file:
                await call.receive(limit_bytes, file.write)
            done = await self._desk.long(
                self._keeping.rebuild, path, call.name, replace=bool(call.number("replace", 0))
            )
        except OSError as error:
            raise StorageError(f"{path} cannot be written", cause=str(error)) from error
        finally:
            await self._desk.long(shutil.rmtree, path.parent, ignore_errors=True)
        return reply(done)

    async def collect(self, call: Call) -> Response:
        return reply(await self._desk.long(self._keeping.collect, call.name))

    async def remove(self, call: Call) -> Response:
        check_yes(call.path("run"), bool(call.number("yes", 0)))
        return reply(await self._desk.long(self._keeping.remove, call.path("run"), call.name))

    async def committed(self, call: Call) -> Response:
        """Which samples are committed, for a node's copy of the ledger."""
        ledger = await self._desk.long(self._desk.hub.ledger, call.path("run"))
        if not isinstance(ledger, Copied):
            raise ConflictError(f"{call.path('run')} tells nothing about samples")
        return reply(await self._desk.long(ledger.committed))


class BackupResponse(StreamingResponse):
    """A backup as it is read. Whatever ends it, also before it began, takes the second names of its files away."""

    def __init__(self, found: Capture, pool: ThreadPoolExecutor) -> None:
        self._found, self._pool = found, pool
        self._step: Future[bytes] | None = None
        super().__init__(self._stream(), media_type="application/zstd", headers={"cache-control": "no-store"})

    async def _stream(self) -> AsyncIterator[bytes]:
        pieces = self._found.pieces()
        while True:
            self._step = self._pool.submit(_next_piece, pieces)
            piece = await asyncio.wrap_future(self._step)
            if not piece:
                return
            yield piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._step is None:
                self._found.drop()
            else:  # a caller that goes away does not stop the thread that reads just now
                self._step.add_done_callback(lambda _: self._found.drop())


def _next_piece(pieces: Iterator[bytes]) -> bytes:
    """The next one that is not empty; b"" at the end."""
    return next((piece for piece in pieces if piece), b"")

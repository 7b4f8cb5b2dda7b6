"""Endpoints for what a hub keeps: backup, rebuilding, retention, removal; and committed samples for nodes' copies."""

import shutil
from collections.abc import AsyncIterator, Iterator

from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ciuic.errors import ConflictError, StorageError
from ciuic.hub.access.auth import NODES, OPERATORS
from ciuic.hub.api.endpoints import Call, Desk, reply
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
        pieces = await self._desk.long(self._keeping.backup, call.name, with_authority=with_authority)

        async def stream() -> AsyncIterator[bytes]:
            try:
                while piece := await self._desk.long(_next_piece, pieces):
                    yield piece
            finally:
                pieces.close()

        return StreamingResponse(stream(), media_type="application/zstd", headers={"cache-control": "no-store"})

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


def _next_piece(pieces: Iterator[bytes]) -> bytes:
    """The next one that is not empty; b"" at the end."""
    return next((piece for piece in pieces if piece), b"")

"""A shard's endpoints: those of a hub that nodes need for fragments, and files of fragments on their way elsewhere."""

import asyncio
from dataclasses import dataclass

from starlette.responses import Response
from starlette.routing import Route

from ciuic.errors import CertificateError, ConflictError, MovedError
from ciuic.hub.access.auth import NODES, SHARDS
from ciuic.hub.api.chunks import ChunkApi
from ciuic.hub.api.endpoints import Call, Front, reply
from ciuic.hub.api.events import Board
from ciuic.hub.api.run import (
    BYTES_PER_ELEMENT,
    ENTRIES_BYTES,
    FRAME_OVERHEAD_BYTES,
    hold,
)
from ciuic.hub.api.shard import moved_file
from ciuic.hub.api.spool import Spool
from ciuic.hub.run.courtesy import ChunkLists, Courtesy, SnapshotResponse
from ciuic.hub.shards.host import ShardHost, files_to_move
from ciuic.hub.shards.link import ShardLink
from ciuic.ledger.files import Spooled
from ciuic.net.chunks import Manifest
from ciuic.net.messages import Ok, PushReply
from ciuic.net.tls import Identity

TOLD_S = 30.0
"""The hub hears of version 0 within this time, before its uploader gets an answer."""


@dataclass(kw_only=True)
class ShardDesk(Front):
    """A shard as its endpoints see it."""

    host: ShardHost
    link: ShardLink
    board: Board

    async def check_caller(self, identity: Identity) -> None:
        serials = self.host.serials_of(identity.name) if identity.role == "node" else []
        if serials is None:
            raise MovedError(f"this shard has not heard of {identity.name} yet", next="try again in a moment")
        is_other = identity.role == "node" and identity.serial not in serials
        if is_other or self.host.is_revoked(identity.serial):
            raise CertificateError(
                f"this shard does not accept {identity.name}",
                cause="its certificate is not the one the hub issued to it last",
                next="ask the operator for a new join token",
            )


class ShardNodeApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: ShardDesk) -> None:
        self._desk, self._host = desk, desk.host
        self._chunks = ChunkApi(desk, Spool(desk.host.folder.parent / "spool"), self)
        self._courtesy, self._lists = Courtesy(), ChunkLists()

    def routes(self) -> list[Route]:
        """All endpoints."""
        route, run = self._desk.route, "/v1/runs/{run}"
        return [
            route("POST", f"{run}/push", self.push, roles=NODES, limit_bytes=0),
            route("GET", f"{run}/entries", self.entries, roles=NODES),
            route("PUT", f"{run}/snapshot", self.put_snapshot, roles=NODES, limit_bytes=0),
            route("GET", f"{run}/snapshot", self.get_snapshot, roles=NODES),
            route("GET", f"{run}/snapshot/chunks", self.list_chunks, roles=NODES),
            *self._chunks.routes(),
            route("GET", f"{run}/files", self.files, roles=SHARDS),
            route("GET", f"{run}/file", self.file, roles=SHARDS),
        ]

    async def push(self, call: Call) -> Response:
        run_id = call.path("run")
        frame = await call.read(self._frame_limit(run_id))
        return reply(await self._push(call, frame))

    async def _push(self, call: Call, frame: bytes, spooled: Spooled | None = None) -> PushReply:
        answer = await self._desk.long(self._host.push, call.name, call.path("run"), frame, spooled)
        self._desk.link.wake()
        return answer

    async def put_snapshot(self, call: Call) -> Response:
        run_id, fragment = call.path("run"), call.number("fragment")
        if call.number("version") != 0:
            raise ConflictError("only version 0 is uploaded", cause="all later versions come from entries")
        frame = await call.read(self._frame_limit(run_id))
        await self._put_version_0(call, fragment, frame)
        return reply(Ok())

    async def _put_version_0(self, call: Call, fragment: int, frame: bytes) -> None:
        await self._desk.long(self._host.put_snapshot, call.name, call.path("run"), fragment, frame)
        await self._desk.long(self._desk.link.flush, TOLD_S)

    # ---- large bodies, in chunks

    async def most_bytes(self, call: Call) -> int:
        """As Taker wants it."""
        return self._frame_limit(call.path("run"))

    async def expect(self, call: Call, manifest: Manifest) -> None:
        """As Taker wants it. Raises MovedError when the fragment is not served here."""
        self._host.check_serves(call.path("run"), manifest.fragment)

    async def take(self, call: Call, manifest: Manifest, frame: bytes, spooled: Spooled) -> PushReply | None:
        """As Taker wants it."""
        if manifest.what == "push":
            return await self._push(call, frame, spooled)
        await self._put_version_0(call, manifest.fragment, frame)
        return None

    async def get_snapshot(self, call: Call) -> Response:
        fragment, version = call.number("fragment"), call.number("version")
        path = await self._desk.long(self._host.snapshot_path, call.path("run"), fragment, version)
        return SnapshotResponse(path, self._courtesy)

    async def list_chunks(self, call: Call) -> Response:
        """As the hub's."""
        fragment, version = call.number("fragment"), call.number("version")
        path = await self._desk.long(self._host.snapshot_path, call.path("run"), fragment, version)
        return reply(await self._desk.long(self._lists.of, path))

    async def entries(self, call: Call) -> Response:
        """As the hub's."""
        run_id, fragment, after = call.path("run"), call.number("fragment"), call.number("after")

        async def fetch() -> list[bytes]:
            return await self._desk.long(self._host.entries_after, run_id, fragment, after, ENTRIES_BYTES)

        return await hold(call, self._desk.board, self._courtesy, fetch)

    async def files(self, call: Call) -> Response:
        folder = await self._desk.long(self._host.moving_folder, call.path("run"), call.number("fragment"), call.name)
        return reply(await asyncio.to_thread(files_to_move, folder))

    async def file(self, call: Call) -> Response:
        folder = await self._desk.long(self._host.moving_folder, call.path("run"), call.number("fragment"), call.name)
        return moved_file(folder, call.text("name"))

    def _frame_limit(self, run_id: str) -> int:
        return FRAME_OVERHEAD_BYTES + BYTES_PER_ELEMENT * self._host.frame_elements(run_id)

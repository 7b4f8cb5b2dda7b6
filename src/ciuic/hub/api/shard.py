"""Endpoints for shards: the view, reports, what they need of a run, files of a fragment on its way; and for people."""

import time
from pathlib import Path

from starlette.responses import Response
from starlette.routing import Route

from ciuic.errors import NotFoundError
from ciuic.hub.access.auth import NODES, OPERATORS, SHARDS, VIEWERS
from ciuic.hub.api.endpoints import MIB, Call, Desk, reply
from ciuic.hub.api.events import ANYTHING
from ciuic.hub.api.events import SHARDS as SHARDS_TOPIC
from ciuic.hub.run.courtesy import Courtesy, SnapshotResponse
from ciuic.hub.shards.host import FETCHED, files_to_move
from ciuic.net.messages import decode
from ciuic.net.shard_messages import PlacesReply, RenewRequest, ShardPoll, ShardReport
from ciuic.net.url import parse_hub_url

LONGEST_WAIT_S = 10.0
LOOK_AGAIN_S = 0.5
"""Some of what a view holds changes without a word (leases run out): it is looked at so often."""
REPORT_LIMIT_BYTES = 64 * MIB


class ShardApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._hub = desk.hub

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        route, run = self._desk.route, "/v1/runs/{run}"
        return [
            route("POST", "/v1/shard/view", self.view, roles=SHARDS),
            route("POST", "/v1/shard/renew", self.renew, roles=SHARDS),
            route("POST", "/v1/shard/report", self.report, roles=SHARDS, limit_bytes=REPORT_LIMIT_BYTES),
            route("GET", f"{run}/shard", self.run, roles=SHARDS),
            route("GET", f"{run}/files", self.files, roles=SHARDS),
            route("GET", f"{run}/file", self.file, roles=SHARDS),
            route("GET", f"{run}/places", self.places, roles=NODES),
            route("GET", f"{run}/shards", self.shards, roles=VIEWERS),
            route("POST", f"{run}/rebalance", self.rebalance, roles=OPERATORS),
        ]

    async def view(self, call: Call) -> Response:
        """Held while nothing changes for this shard."""
        request = decode(call.body, ShardPoll)
        url = parse_hub_url(request.url).url
        until_s = time.monotonic() + min(LONGEST_WAIT_S, request.wait_s)
        board = self._hub.board
        while True:
            seen = board.seen(SHARDS_TOPIC)
            await self._desk.short(self._hub.shards.heard, call.name, url)
            view = await self._desk.long(self._hub.shard_view, call.name)
            left_s = until_s - time.monotonic()
            if view.number != request.known or left_s <= 0 or board.is_closed:
                return reply(view)
            await board.wait(SHARDS_TOPIC, seen, min(left_s, LOOK_AGAIN_S))

    async def renew(self, call: Call) -> Response:
        return reply(await self._desk.short(self._hub.renew_shard, call.known, decode(call.body, RenewRequest)))

    async def report(self, call: Call) -> Response:
        request = decode(call.body, ShardReport)
        answer = await self._desk.long(self._hub.shard_report, call.name, request)
        self._hub.board.notify(ANYTHING)
        return reply(answer)

    async def run(self, call: Call) -> Response:
        return reply(await self._desk.long(lambda: self._hub.sharded(call.path("run")).shard_run()))

    async def places(self, call: Call) -> Response:
        urls = await self._desk.long(lambda: self._hub.sharded(call.path("run")).places())
        return reply(PlacesReply(urls=urls))

    async def files(self, call: Call) -> Response:
        return reply(files_to_move(await self._folder(call)))

    async def file(self, call: Call) -> Response:
        return moved_file(await self._folder(call), call.text("name"))

    async def _folder(self, call: Call) -> Path:
        number = call.number("fragment")
        return await self._desk.long(lambda: self._hub.sharded(call.path("run")).moving_folder(number, call.name))

    async def shards(self, call: Call) -> Response:
        return reply(await self._desk.long(lambda: self._hub.sharded(call.path("run")).shards()))

    async def rebalance(self, call: Call) -> Response:
        return reply(await self._desk.long(lambda: self._hub.sharded(call.path("run")).shards(rebalance=True)))


def moved_file(folder: Path, name: str) -> Response:
    """One file of a fragment on its way. Raises NotFoundError."""
    path = folder / name
    if not FETCHED.fullmatch(name) or not path.is_file():
        raise NotFoundError(f"a fragment has no file {name[:100]!r}")
    return SnapshotResponse(path, Courtesy())

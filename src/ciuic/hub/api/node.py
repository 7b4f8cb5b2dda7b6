"""Endpoints for agents: joining, heartbeats, logs, leaving, bandwidth probe. And what anybody may ask."""

import os
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ciuic.hub.access.auth import NODES
from ciuic.hub.api.endpoints import MIB, Call, Desk, reply
from ciuic.hub.api.events import ANYTHING, node_topic
from ciuic.hub.membership.state import Desired
from ciuic.net.messages import (
    Assignment,
    HeartbeatReply,
    HeartbeatRequest,
    JoinRequest,
    LeaveRequest,
    LogRequest,
    Ok,
    decode,
)

PUBLIC = frozenset({"/health", "/ca.pem", "/v1/join"})
PROBE_LIMIT_BYTES = 8 * MIB
PROBE_PIECE_BYTES = 64 * 1024
LOG_LIMIT_BYTES = 8 * MIB


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """GET /health."""

    ok: bool
    boot_id: str
    version: str


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/node/probe."""

    bytes: int


class NodeApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: Desk, version: str) -> None:
        self._desk = desk
        self._hub = desk.hub
        self._version = version

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        route = self._desk.route
        return [
            route("GET", "/health", self.health, roles=None),
            route("GET", "/ca.pem", self.authority, roles=None),
            route("POST", "/v1/join", self.join, roles=None),
            route("POST", "/v1/node/heartbeat", self.heartbeat, roles=NODES),
            route("POST", "/v1/node/logs", self.logs, roles=NODES, limit_bytes=LOG_LIMIT_BYTES),
            route("POST", "/v1/node/leave", self.leave, roles=NODES),
            route("POST", "/v1/node/probe", self.probe_up, roles=NODES, limit_bytes=0),
            route("GET", "/v1/node/probe", self.probe_down, roles=NODES),
        ]

    async def health(self, call: Call) -> Response:
        return reply(Health(ok=True, boot_id=self._hub.boot_id, version=self._version))

    async def authority(self, call: Call) -> Response:
        return Response(self._hub.authority.certificate_pem, media_type="application/x-pem-file")

    async def join(self, call: Call) -> Response:
        return reply(await self._desk.short(self._hub.join, decode(call.body, JoinRequest)))

    async def heartbeat(self, call: Call) -> Response:
        """Take the beat at once, hold the answer while nothing changes for this node."""
        request = decode(call.body, HeartbeatRequest)
        node_id, board = call.name, self._hub.board
        await self._desk.short(self._hub.beat, node_id, request)
        keeper, peers = self._hub.gatekeeper, self._hub.peers
        peers.told(node_id, request, keeper.names_of(call.known.serial))
        board.notify(ANYTHING)  # when it was last heard is shown to people
        began_s = time.monotonic()
        while True:
            seen = board.seen(node_topic(node_id))
            desired, epoch = await self._desk.short(self._hub.desired, node_id, request.agent_incarnation)
            left_s = began_s + min(request.wait_s, desired.heartbeat_s) - time.monotonic()
            if desired.revision != request.known_revision or left_s <= 0 or board.is_closed:
                told = self._heartbeat_reply(desired, epoch)
                to_measure = bool(desired.measure_ticket) and desired.measure_ticket != request.measure_ticket
                more = {
                    "renew": keeper.wants_renewal(call.known.serial),
                    "peers": peers.others(node_id, self._hub.is_here) if to_measure else {},
                    "revoked": keeper.revoked_serials() if request.offer is not None else [],
                }
                return reply(msgspec.structs.replace(told, **more))
            await board.wait(node_topic(node_id), seen, left_s)

    def _heartbeat_reply(self, desired: Desired, epoch: int) -> HeartbeatReply:
        run = desired.run
        return HeartbeatReply(
            boot_id=self._hub.boot_id,
            epoch=epoch,
            revision=desired.revision,
            assignment=None if run is None else Assignment(run_id=run.run_id, job=run.job, attempt=run.attempt),
            stop_worker=desired.stop_worker,
            heartbeat_s=desired.heartbeat_s,
            hub_time=time.time(),
            measure_ticket=desired.measure_ticket,
        )

    async def logs(self, call: Call) -> Response:
        request = decode(call.body, LogRequest)
        await self._desk.short(self._hub.add_log_lines, call.name, request.run_id, request.lines)
        return reply(Ok())

    async def leave(self, call: Call) -> Response:
        request = decode(call.body, LeaveRequest)
        await self._desk.short(self._hub.leave, call.name, request.agent_incarnation)
        return reply(Ok())

    async def probe_up(self, call: Call) -> Response:
        """Count what arrives, keep nothing."""
        return reply(Probed(bytes=await call.receive(PROBE_LIMIT_BYTES, len)))

    async def probe_down(self, call: Call) -> Response:
        """As many random bytes as asked for: nothing on the way can compress them."""
        count = call.number("bytes", largest=PROBE_LIMIT_BYTES)

        async def pieces() -> AsyncIterator[bytes]:
            left = count
            while left > 0:
                piece = os.urandom(min(left, PROBE_PIECE_BYTES))
                left -= len(piece)
                yield piece

        headers = {"content-length": str(count)}
        return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)

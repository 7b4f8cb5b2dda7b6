"""Endpoints for operators: tokens, runs, eviction."""

from starlette.responses import Response
from starlette.routing import Route

from ciuic.hub.access.auth import OPERATORS
from ciuic.hub.api.endpoints import MIB, Call, Desk, reply
from ciuic.net.messages import (
    CreateTokenReply,
    CreateTokenRequest,
    MeasureReply,
    Ok,
    SubmitRequest,
    SyncRequest,
    decode,
)
from ciuic.net.tokens import make_token


class OperatorApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: Desk, url: str) -> None:
        self._desk = desk
        self._hub = desk.hub
        self._url = url

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        route = self._desk.route
        return [
            route("POST", "/v1/tokens", self.create_token, roles=OPERATORS),
            route("POST", "/v1/runs", self.submit, roles=OPERATORS, limit_bytes=2 * MIB),
            route("POST", "/v1/runs/{run}/stop", self.stop, roles=OPERATORS),
            route("POST", "/v1/runs/{run}/resume", self.resume, roles=OPERATORS),
            route("POST", "/v1/runs/{run}/sync", self.change_sync, roles=OPERATORS),
            route("POST", "/v1/nodes/{node}/evict", self.evict, roles=OPERATORS),
            route("POST", "/v1/nodes/{node}/measure", self.measure, roles=OPERATORS),
        ]

    async def create_token(self, call: Call) -> Response:
        request = decode(call.body, CreateTokenRequest)
        made = await self._desk.short(self._hub.create_token, request, call.name)
        fingerprint = self._hub.authority.fingerprint
        token = make_token(url=self._url, authority_fingerprint=fingerprint, id=made.token_id, secret=made.secret)
        return reply(CreateTokenReply(token=token, token_id=made.token_id, expires_at=made.expires_at, uses=made.uses))

    async def submit(self, call: Call) -> Response:
        return reply(await self._desk.short(self._hub.submit, decode(call.body, SubmitRequest)))

    async def stop(self, call: Call) -> Response:
        await self._desk.short(self._hub.stop_run, call.path("run"))
        return reply(Ok())

    async def resume(self, call: Call) -> Response:
        await self._desk.short(self._hub.resume_run, call.path("run"))
        return reply(Ok())

    async def change_sync(self, call: Call) -> Response:
        request = decode(call.body, SyncRequest)
        await self._desk.long(self._hub.change_sync, call.path("run"), request, call.name)
        return reply(Ok())

    async def evict(self, call: Call) -> Response:
        await self._desk.short(self._hub.evict, call.path("node"), call.name)
        return reply(Ok())

    async def measure(self, call: Call) -> Response:
        """Ask the node to measure itself with its next heartbeat."""
        return reply(MeasureReply(ticket=await self._desk.short(self._hub.ask_measure, call.path("node"))))

"""Endpoints for certificates and the audit log."""

import time

from msgspec.structs import asdict
from starlette.responses import Response
from starlette.routing import Route

from ciuic.hub.access.auth import NODES, OPERATORS, VIEWERS
from ciuic.hub.access.rotation import Rotation
from ciuic.hub.api.endpoints import Call, Desk, reply
from ciuic.hub.api.events import SHARDS
from ciuic.net.access_messages import (
    AuditPage,
    CertificateReply,
    CertificateRequest,
    OperatorReply,
    OperatorRequest,
    RevokeReply,
    RevokeRequest,
    RotateReply,
    RotateRequest,
)
from ciuic.net.messages import Ok, decode

AUDIT_LINES = 1000
CSR_LIMIT_BYTES = 64 * 1024


class AccessApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: Desk, rotation: Rotation, url: str) -> None:
        self._desk, self._rotation, self._url = desk, rotation, url
        self._hub, self._keeper = desk.hub, desk.hub.gatekeeper

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        route = self._desk.route
        return [
            route("POST", "/v1/node/renew", self.renew, roles=NODES, limit_bytes=CSR_LIMIT_BYTES),
            route("POST", "/v1/operator/renew", self.renew, roles=VIEWERS, limit_bytes=CSR_LIMIT_BYTES),
            route("POST", "/v1/operators", self.create_operator, roles=OPERATORS, limit_bytes=CSR_LIMIT_BYTES),
            route("GET", "/v1/certificates", self.certificates, roles=OPERATORS),
            route("POST", "/v1/certificates/revoke", self.revoke, roles=OPERATORS),
            route("POST", "/v1/hub/rotate", self.rotate, roles=OPERATORS),
            route("GET", "/v1/audit", self.audit, roles=OPERATORS),
            route("GET", "/v1/tokens", self.tokens, roles=OPERATORS),
            route("POST", "/v1/tokens/{token}/revoke", self.revoke_token, roles=OPERATORS),
        ]

    async def renew(self, call: Call) -> Response:
        """A new certificate under the same name; the present one is the proof."""
        request = decode(call.body, CertificateRequest)
        pem = await self._desk.short(self._keeper.renew, call.known, request.csr_pem, request.names)
        return reply(CertificateReply(certificate_pem=pem.decode("ascii"), names=request.names))

    async def create_operator(self, call: Call) -> Response:
        request = decode(call.body, OperatorRequest)
        one, pem = await self._desk.short(self._keeper.create_operator, request, call.name)
        body = OperatorReply(name=one.name, serial=one.serial, certificate_pem=pem.decode("ascii"), url=self._url)
        return reply(body)

    async def tokens(self, call: Call) -> Response:
        return reply(list(await self._desk.short(lambda: self._hub.tokens.open_tokens(wall_s=time.time()))))

    async def revoke_token(self, call: Call) -> Response:
        await self._desk.short(self._hub.tokens.revoke, call.path("token"))
        return reply(Ok())

    async def certificates(self, call: Call) -> Response:
        return reply(list(await self._desk.short(self._keeper.certificates)))

    async def revoke(self, call: Call) -> Response:
        return reply(await self._desk.short(self._revoke, decode(call.body, RevokeRequest), call.name))

    def _revoke(self, request: RevokeRequest, by: str) -> RevokeReply:
        """A node is evicted with it: its work goes to others."""
        name, role = self._keeper.find(request)
        serials = [one.serial for one in self._keeper.book.of(name, role)]
        if role == "node":
            self._hub.evict(name, by)
        self._keeper.revoke(name, role, by)
        return RevokeReply(name=name, role=role, serials=serials)

    async def rotate(self, call: Call) -> Response:
        request = decode(call.body, RotateRequest)
        now = await self._rotation.rotate()
        told = await self._desk.short(self._keeper.want_renewals) if request.clients else 0
        self._hub.board.notify(SHARDS)
        return reply(RotateReply(serial=now.serial, ends_at=now.ends_at, told=told))

    async def audit(self, call: Call) -> Response:
        """Lines after a number, or since a moment, oldest first; and whether the log is whole."""
        since_s = call.seconds("since", 0.0, largest=1e12)
        after, limit = call.number("after", 0), call.number("limit", AUDIT_LINES, largest=AUDIT_LINES)
        return reply(await self._desk.long(self._page, since_s, after, limit))

    def _page(self, since_s: float, after: int, limit: int) -> AuditPage:
        trail = self._keeper.trail
        trail.sum_up(now=True)
        lines = [asdict(line) for line in trail.lines(since_s=since_s, after=after, limit=limit)]
        return AuditPage(lines=lines, broken_at=trail.first_broken())

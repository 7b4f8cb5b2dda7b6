"""Endpoints: who may call, how much they may send, and how errors are answered.

Every endpoint goes through `Desk.route`: certificate, role, size (before reading when the caller says it, while reading
in any case), then the handler; any CiuicError becomes {"error": {...}} with its HTTP status.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ciuic.errors import (
    AccessError,
    CertificateError,
    CiuicError,
    ConflictError,
    FrameError,
    MovedError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    StorageError,
    SupersededError,
    UsageError,
    error_to_dict,
)
from ciuic.hub.access.auth import check_node, check_role, no_certificate
from ciuic.hub.access.limits import Limits
from ciuic.hub.access.recorded import Asked, action_of, audit_row
from ciuic.hub.core import Hub
from ciuic.hub.protocol import address_of, identity_of
from ciuic.net.messages import Role
from ciuic.net.tls import Identity
from ciuic.units import format_bytes

P = ParamSpec("P")
T = TypeVar("T")

KIB = 1024
MIB = 1024 * KIB
JSON_LIMIT_BYTES = MIB
NO_PROGRESS_S = 30.0
"""A body that stops arriving for so long is given up."""
LEAST_BYTES_PER_S = 128
"""A body that takes longer than `NO_PROGRESS_S` must be at least so fast on average (the slowest link is 35 kbit/s)."""

_STATUS: list[tuple[type[CiuicError], int]] = [
    (CertificateError, 401),
    (AccessError, 403),
    (NotFoundError, 404),
    (SupersededError, 409),
    (ConflictError, 409),
    (MovedError, 421),
    (OverloadedError, 429),
    (ProtocolError, 400),
    (UsageError, 400),
    (StorageError, 507),
]
_log = structlog.get_logger("ciuic.hub")


class TooLarge(Exception):  # noqa: N818 - carries the error that the caller gets
    """A body is larger than its endpoint accepts."""

    def __init__(self, error: CiuicError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(kw_only=True)
class Call:
    """One request on its way through."""

    request: Request
    caller: Identity | None
    body: bytes = b""

    @property
    def name(self) -> str:
        """Who calls (the node id of a node)."""
        return self.caller.name if self.caller is not None else ""

    @property
    def known(self) -> Identity:
        """Who calls, where only callers with a certificate come. Raises CertificateError."""
        if self.caller is None:
            raise no_certificate()
        return self.caller

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body. Raises TooLarge before or while reading, ProtocolError when it stops arriving."""
        pieces: list[bytes] = []
        await self.receive(limit_bytes, pieces.append)
        self.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return self.body

    async def receive(self, limit_bytes: int, sink: Callable[[bytes], object]) -> int:
        """Hand the body to `sink` piece by piece; returns its size. Raises as `read`."""
        _check_length(self.request, limit_bytes)
        total, began_s = 0, time.monotonic()
        stream = self.request.stream()
        while True:
            try:
                piece = await asyncio.wait_for(anext(stream, None), NO_PROGRESS_S)
            except TimeoutError:
                raise ProtocolError(
                    f"the body stopped after {total} bytes", cause=f"nothing came for {NO_PROGRESS_S:.0f} s"
                ) from None
            if piece is None:
                return total
            total += len(piece)
            if total > limit_bytes:
                raise _too_large(total, limit_bytes)
            if total < LEAST_BYTES_PER_S * (time.monotonic() - began_s - NO_PROGRESS_S):
                raise ProtocolError(f"the body comes too slowly: {total} bytes so far", next="check the network")
            if piece:
                sink(piece)

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    def number(self, name: str, default: int | None = None, *, largest: int = 2**53) -> int:
        """A whole number >= 0 of the query. Raises ProtocolError."""
        text = self.request.query_params.get(name)
        if text is None and default is not None:
            return default
        if text is None or not (text.isascii() and text.isdigit()) or len(text) > 16 or int(text) > largest:
            raise ProtocolError(f"the query needs {name} as a whole number of at most {largest}, not {text!r}")
        return int(text)

    def seconds(self, name: str, default: float, *, largest: float) -> float:
        """Seconds of the query, cut to 0..largest. Raises ProtocolError."""
        text = self.request.query_params.get(name, str(default))
        try:
            return min(largest, max(0.0, float(text)))
        except ValueError as error:
            raise ProtocolError(f"the query needs {name} in seconds, not {text[:40]!r}") from error

    def text(self, name: str) -> str:
        return self.request.query_params.get(name, "")


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(kw_only=True)
class Front:
    """A program as its endpoints see it: thread pools for its synchronous work, and counts of what was answered."""

    control: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "hub-control"))
    """For short calls: a heartbeat never waits behind an upload."""
    bulk: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, "hub-bulk"))
    """For ledgers."""
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By path template and HTTP status."""

    async def short(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something quick off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.control, partial(work, *args, **kwargs))

    async def long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something that may take a while off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.bulk, partial(work, *args, **kwargs))

    def close(self) -> None:
        """Take no more work; what runs ends by itself."""
        self.control.shutdown(wait=False, cancel_futures=True)
        self.bulk.shutdown(wait=False, cancel_futures=True)

    def route(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        roles: frozenset[Role] | None,
        limit_bytes: int = JSON_LIMIT_BYTES,
    ) -> Route:
        """An endpoint. Its body is read before `handler` is called, unless `limit_bytes` is 0. `roles` None: all."""
        action = action_of(method, path, roles)

        async def endpoint(request: Request) -> Response:
            call = Call(request=request, caller=None)
            response = await self._answer(call, handler, roles, limit_bytes)
            self.answered[path, response.status_code] += 1
            if response.status_code in REFUSALS:
                self.turned_away(request.scope, response.status_code)
            elif action:
                await self.took_place(action, call, response)
            return response

        return Route(path, endpoint, methods=[method])

    async def _answer(self, call: Call, handler: Handler, roles: frozenset[Role] | None, limit_bytes: int) -> Response:
        try:
            if roles is not None:
                call.caller = await self._caller(call.request.scope, roles)
            if limit_bytes:
                await call.read(limit_bytes)
            return await handler(call)
        except TooLarge as refusal:
            return error_response(refusal.error, 413)
        except CiuicError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except Exception:  # noqa: BLE001 - the caller gets an answer, the log the story
            _log.exception("request crashed", path=call.request.url.path)
            error = CiuicError("the hub made an error", cause="see its log", next="please report it")
            return error_response(error, 500)

    async def _caller(self, scope: Scope, roles: frozenset[Role]) -> Identity:
        identity = identity_of(scope)
        await self.check_caller(identity)
        check_role(identity, roles)
        return identity

    async def check_caller(self, identity: Identity) -> None:
        """Whether somebody with a certificate of the authority may still speak. Raises CertificateError."""

    async def took_place(self, action: str, call: Call, response: Response) -> None:
        """Something that goes into the audit log was asked for, and was not refused for who asked."""

    def turned_away(self, scope: Scope, status: int) -> None:
        """A request was refused for who asked, or for how much was asked."""


@dataclass(kw_only=True)
class Desk(Front):
    """The hub's."""

    hub: Hub

    async def check_caller(self, identity: Identity) -> None:
        keeper = self.hub.gatekeeper
        if identity.role == "node":
            check_node(identity, self.hub.node(identity.name), is_recorded=keeper.knows(identity))
        if keeper.check(identity) != "good":
            await self.short(keeper.meet, identity)

    async def took_place(self, action: str, call: Call, response: Response) -> None:
        asked = Asked(
            action=action,
            caller=call.caller,
            address=address_of(call.request.scope),
            target="/".join(str(value) for value in call.request.path_params.values()),
            wish=call.body,
        )
        row = audit_row(asked, response.status_code, bytes(getattr(response, "body", b"")))
        try:
            await self.short(self.hub.gatekeeper.trail.record, row)
        except StorageError as error:  # it has been done: the caller is told so, the log says what is missing
            _log.error("the audit log cannot be written", action=row.action, who=row.who, error=str(error))

    def turned_away(self, scope: Scope, status: int) -> None:
        self.hub.gatekeeper.trail.refused(address_of(scope), status)


REFUSALS = frozenset({401, 403, 413, 429})
"""Counted, not listed, in the audit log."""


# ---- bodies --------------------------------------------------------------------------------------------------------


def _check_length(request: Request, limit_bytes: int) -> None:
    """Look at what the caller says it will send. Raises TooLarge, ProtocolError."""
    text = request.headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ProtocolError(f"{text[:40]!r} is not a content length")
    if int(text) > limit_bytes:
        raise _too_large(int(text), limit_bytes)


def _too_large(size_bytes: int, limit_bytes: int) -> TooLarge:
    """The refusal of a body."""
    return TooLarge(
        FrameError(
            f"a body of {format_bytes(size_bytes)} is not accepted here",
            cause=f"at most {format_bytes(limit_bytes)} is",
        )
    )


# ---- answers -------------------------------------------------------------------------------------------------------


def reply(message: msgspec.Struct | list[object], status: int = 200) -> Response:
    """A message as JSON."""
    return Response(msgspec.json.encode(message), status, media_type="application/json")


def error_response(error: CiuicError, status: int | None = None) -> Response:
    """{"error": {code, message, cause, next}} with the status of its kind."""
    if status is None:
        status = next((number for kind, number in _STATUS if isinstance(error, kind)), 500)
    body = msgspec.json.encode({"error": error_to_dict(error)})
    return Response(body, status, media_type="application/json")


def not_found(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, wrong method) in our words."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path[:200]}"
    return error_response(
        NotFoundError(f"the hub does not know {what}", next="use the same version of ciuic on both sides"), status
    )


class Gate:
    """Outermost: without a certificate of the authority there is nothing here, not even a 404; with one, not too much.

    Nothing of the body is read and nothing is kept for who is turned away here.
    """

    def __init__(self, app: ASGIApp, public: frozenset[str], front: Front, limits: Limits) -> None:
        self._app, self._public, self._front, self._limits = app, public, front, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._refusal(scope) if scope["type"] == "http" else None
        if response is None:
            await self._app(scope, receive, send)
            return
        self._front.answered["(nobody)", response.status_code] += 1
        self._front.turned_away(scope, response.status_code)
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        name, refused = "", None
        try:
            identity = identity_of(scope)
            name = f"{identity.role}/{identity.name}"
        except CertificateError as error:
            refused = error if scope["path"] not in self._public else None
        wait_s = self._limits.ask(address_of(scope), name, asyncio.get_running_loop().time())
        if wait_s > 0:
            error = OverloadedError(
                f"{name.partition('/')[2] or 'this address'} asks too often",
                cause="it has used up what one caller may ask for",
                next=f"wait {wait_s:.1f} s, or have the hub started with another --limit",
            )
            response = error_response(error)
            response.headers["retry-after"] = str(math.ceil(wait_s))
            return response
        return None if refused is None else error_response(refused)

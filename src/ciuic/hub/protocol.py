"""What uvicorn does not do by itself: show the application the caller's certificate, and not wait for ever.

uvicorn verifies client certificates but keeps them to itself; here each request's scope gets the connection's `Peer`.
A caller that dribbles its request line and headers (slow loris), or sends endless ones, is cut off.
"""

import asyncio
from collections.abc import MutableMapping
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ciuic.errors import CertificateError
from ciuic.hub.access.auth import no_certificate
from ciuic.hub.access.limits import Limits
from ciuic.hub.run.courtesy import SOCKET
from ciuic.net.tls import Identity, identity_from_der

PEER = "ciuic.peer"
REQUEST_S = 20.0
"""How long a request's headers may take to arrive, and a new connection to send its first request."""
MAX_HEAD_BYTES = 64 * 1024
MAX_UNWANTED_BYTES = 64 * 1024 * 1024
"""A refused body is still read so far: callers look at the answer only when they have sent it all."""
STRANGERS_UNWANTED_BYTES = 1024 * 1024
"""The same of a caller without a certificate."""
STRANGERS_KEEP_ALIVE_S = 15.0
"""How long a connection without a certificate may be idle after an answer."""


class Peer:
    """The other end of one connection; its identity is read from the certificate once."""

    def __init__(self, der: bytes | None) -> None:
        self._der = der
        self._identity: Identity | None = None

    @property
    def is_anonymous(self) -> bool:
        """It showed no certificate."""
        return self._der is None

    @property
    def key(self) -> str:
        """By what its requests and connections are counted; empty: by its address only."""
        try:
            identity = self.identity()
        except CertificateError:
            return ""
        return f"{identity.role}/{identity.name}"

    def identity(self) -> Identity:
        """Who it is. Raises CertificateError."""
        if self._identity is None:
            if self._der is None:
                raise no_certificate()
            self._identity = identity_from_der(self._der)
        return self._identity


def identity_of(scope: MutableMapping[str, Any]) -> Identity:
    """Who sent this request. Raises CertificateError."""
    peer = scope.get(PEER)
    if not isinstance(peer, Peer):
        raise no_certificate()
    return peer.identity()


def address_of(scope: MutableMapping[str, Any]) -> str:
    """From where this request came."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


class PeerProtocol(HttpToolsProtocol):
    """One connection."""

    limits: Limits | None = None
    """Where it is counted, under its address and name."""
    address = "unknown"
    has_met = False
    """Its handshake is done."""
    _peer = Peer(None)
    _key = ""
    _is_counted = False
    _patience: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True
    _unwanted_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.has_met = True
        ssl_object = transport.get_extra_info("ssl_object")
        self._peer = Peer(ssl_object.getpeercert(binary_form=True) if ssl_object is not None else None)
        self._key = self._peer.key
        if not self._key:
            self.timeout_keep_alive = STRANGERS_KEEP_ALIVE_S
        if self.limits is not None:
            if self.limits.settle(self.address, self._key, self.loop.time()):
                transport.abort()
                return
            self._is_counted = True
        self._expect_head()

    @property
    def peer(self) -> Peer:
        """The other end."""
        return self._peer

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_patience()
        if self._is_counted and self.limits is not None:
            self._is_counted = False
            self.limits.leave(self.address, self._key)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[PEER] = self._peer
        cast("dict[str, Any]", self.scope)[SOCKET] = self.transport.get_extra_info("socket")
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._forget_patience()
        if not self._key:  # its body, too, must come within that time, however steadily it dribbles
            self._patience = self.loop.call_later(REQUEST_S, self.transport.abort)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._forget_patience()
        super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """What comes after the answer was given is dropped (by uvicorn), but not for ever."""
        if self.cycle.response_complete:
            self._unwanted_bytes += len(body)
            if self._unwanted_bytes > (MAX_UNWANTED_BYTES if self._key else STRANGERS_UNWANTED_BYTES):
                self.transport.abort()
        super().on_body(body)

    def _expect_head(self) -> None:
        self._in_head = True
        self._unwanted_bytes = 0
        self._forget_patience()
        self._patience = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _forget_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

"""Requests and bodies on one kept-alive connection: sizes checked, cuts noticed, errors rebuilt.

`Exchange` is the part of HubClient below the protocol's messages. It is confined to one thread, except `interrupt`.
"""

import email.utils
import http.client
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from ciuic.errors import (
    CertificateError,
    CiuicError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    RoleError,
    UnreachableError,
    UsageError,
    error_from_dict,
)
from ciuic.net.connection import DEAD_KEEP_ALIVE, INTERRUPTED, NETWORK_ERRORS, HubConnection, explain
from ciuic.net.url import HubAddress

T = TypeVar("T")
Body = bytes | bytearray | memoryview

_PATH = re.compile(r"/[!-~]*")
ERROR_LIMIT_BYTES = 1024 * 1024
_PIECE_BYTES = 128 * 1024
"""Bodies move in pieces of this size, so that the socket time-out measures progress (at 30 s: 35 kbit/s)."""


class Exchange:
    """One connection to `address` that is opened when it is needed and again when it died."""

    def __init__(self, address: HubAddress, context: ssl.SSLContext, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.server_time: float | None = None
        """The hub's clock in its latest answer (seconds since 1970, whole seconds)."""
        self._context = context
        self._connection: HubConnection | None = None
        self.renewed: Callable[[ssl.SSLContext], ssl.SSLContext | None] = lambda in_use: None
        """A context with another certificate, when ours is refused and was renewed meanwhile."""

    def request(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        headers: dict[str, str] | None = None,
        silence_s: float | None = None,
    ) -> http.client.HTTPResponse:
        """As `_request`; once more with a renewed certificate when the hub refuses ours and there is one."""
        try:
            return self._request(method, path, body, headers, silence_s)
        except CertificateError:
            if not self._take_renewed():
                raise
        return self._request(method, path, body, headers, silence_s)

    def _take_renewed(self) -> bool:
        context = self.renewed(self._context)
        if context is None:
            return False
        self.close()
        self._context = context
        return True

    def _request(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        headers: dict[str, str] | None = None,
        silence_s: float | None = None,
    ) -> http.client.HTTPResponse:
        """Send, and return a successful response with its body unread; otherwise raise what the hub or network gave.

        One retry, and only when a kept-alive connection died before the first byte of the answer.
        """
        if not _PATH.fullmatch(path):
            raise UsageError(
                f"{path!r} cannot be asked for", cause="it holds characters that a web address cannot have"
            )
        silence_s = silence_s or self.timeout_s
        wire_headers = dict(headers or {})
        if body is not None:
            wire_headers["Content-Length"] = str(memoryview(body).nbytes)

        def attempt() -> http.client.HTTPResponse:
            return self._attempt(method, path, body, wire_headers, silence_s)

        reused = self._connection is not None and self._connection.sock is not None
        try:
            response = attempt()
        except DEAD_KEEP_ALIVE as error:
            if not reused or self._is_interrupted:
                raise self._broken(error, silence_s) from error
            self.close()
            response = self.guarded(attempt, silence_s)
        except NETWORK_ERRORS as error:
            raise self._broken(error, silence_s) from error
        self.server_time = _date_of(response)
        if response.status >= 300:
            raise self._error_of(response)
        return response

    def open(self) -> None:
        """Connect now rather than with the first request. Raises UnreachableError, CertificateError."""
        self.guarded(lambda: self._connected(self.timeout_s), self.timeout_s)

    def stream(self, path: str, pieces: Iterable[Body]) -> http.client.HTTPResponse:
        """POST a body of unknown length, piece by piece, and return a successful response; otherwise raise.

        `pieces` are HTTP/1.1 chunks as they go over the wire, the last one of no bytes included. Never repeated: the
        caller knows what has arrived.
        """
        silence_s = self.timeout_s

        def send() -> http.client.HTTPResponse:
            connection = self._connected(silence_s)
            try:
                connection.putrequest("POST", path)
                connection.putheader("Content-Type", "application/octet-stream")
                connection.putheader("Transfer-Encoding", "chunked")
                connection.endheaders()
                for piece in pieces:
                    connection.send(piece)
            except (BrokenPipeError, ConnectionResetError):
                response = connection.getresponse()  # the hub may have said why it does not read on
                self._connection = None
                return response
            return connection.getresponse()

        response = self.guarded(send, silence_s)
        self.server_time = _date_of(response)
        if response.status >= 300:
            error = self._error_of(response)
            if isinstance(error, CertificateError) and self._take_renewed():
                raise UnreachableError("our certificate was renewed meanwhile", next="send the rest again") from error
            raise error
        return response

    def read(self, response: http.client.HTTPResponse, limit_bytes: int) -> bytes:
        """The whole body. Raises ProtocolError above the limit (before allocating when the size is announced)."""
        pieces: list[bytes] = []
        self.drain(response, pieces.append, limit_bytes)
        return b"".join(pieces)

    def drain(self, response: http.client.HTTPResponse, sink: Callable[[bytes], object], limit_bytes: int) -> None:
        """Pass the whole body to `sink` in pieces. A body cut short is UnreachableError, never a short body."""
        try:
            self._drain(response, sink, limit_bytes)
        except BaseException:  # whatever it was (also the sink's): the rest of the body is still on the connection
            self.close()
            raise

    def _drain(self, response: http.client.HTTPResponse, sink: Callable[[bytes], object], limit_bytes: int) -> None:
        expected, total = response.length, 0
        if expected is not None and expected > limit_bytes:
            raise ProtocolError(f"the hub's answer of {expected} bytes is not accepted", cause=f"limit {limit_bytes}")
        while piece := self.guarded(lambda: response.read(_PIECE_BYTES), self.timeout_s):
            total += len(piece)
            if total > limit_bytes:
                raise ProtocolError(f"the hub's answer is larger than {limit_bytes} bytes")
            sink(piece)
        if expected is not None and total < expected:
            raise UnreachableError(
                f"the connection to the hub at {self.address.url} broke",
                cause=f"it ended after {total} of {expected} bytes",
                next="check the network; `ciuic node check` tests each step to the hub",
            )

    def guarded(self, work: Callable[[], T], silence_s: float) -> T:
        """Run something that uses the connection; when the network fails, close it and explain."""
        try:
            return work()
        except NETWORK_ERRORS as error:
            raise self._broken(error, silence_s) from error

    @property
    def _is_interrupted(self) -> bool:
        return self._connection is not None and self._connection.interrupted

    def _broken(self, error: Exception, silence_s: float) -> CiuicError:
        """Close the connection; the error for the caller."""
        interrupted = self._is_interrupted
        self.close()
        if interrupted:
            return UnreachableError(f"a request to the hub at {self.address.url} was ended", cause=INTERRUPTED)
        return explain(error, self.address, silence_s)

    @property
    def sock(self) -> socket.socket | None:
        """The connection's socket; None while there is no connection."""
        return None if self._connection is None else self._connection.sock

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """From another thread: end a request that is waiting; its own thread gets UnreachableError."""
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    def _attempt(
        self, method: str, path: str, body: Body | None, headers: dict[str, str], silence_s: float
    ) -> http.client.HTTPResponse:
        connection = self._connected(silence_s)
        try:
            connection.request(method, path, body=None if body is None else _pieces(body), headers=headers)
        except (BrokenPipeError, ConnectionResetError):
            # The hub may have answered (too large, not allowed) and closed before it read the whole body.
            response = connection.getresponse()
            self._connection = None  # not usable again; the response holds the socket
            return response
        return connection.getresponse()

    def _connected(self, silence_s: float) -> HubConnection:
        connection = self._connection
        if connection is None or connection.sock is None:
            connection = HubConnection(self.address, self._context, min(silence_s, self.timeout_s))
            connection.connect()
            self._connection = connection
        connection.sock.settimeout(silence_s)
        return connection

    def _error_of(self, response: http.client.HTTPResponse) -> CiuicError:
        body = self.read(response, ERROR_LIMIT_BYTES)
        try:
            return error_from_dict(msgspec.json.decode(body, type=dict[str, dict[str, object]])["error"])
        except (msgspec.DecodeError, KeyError):
            return _error_without_body(response.status, self.address)


def _pieces(body: Body) -> Iterator[memoryview]:
    view = memoryview(body).cast("B")
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]


def _date_of(response: http.client.HTTPResponse) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(response.getheader("Date", "")).timestamp()
    except (ValueError, TypeError):
        return None


def _error_without_body(status: int, address: HubAddress) -> CiuicError:
    """An answer without our error body comes from something in front of the hub, or from no hub at all."""
    cause = f"{address.url} answered HTTP {status} without an explanation"
    if status == 401:
        return CertificateError("the hub does not know us", cause=cause, next="join with a token first")
    if status == 403:
        return RoleError("the hub does not allow this", cause=cause)
    if status == 404:
        return NotFoundError("the hub does not know this path", cause=cause, next="use the same version on both sides")
    if status == 429:
        return OverloadedError("the hub takes no more requests from us now", cause=cause, next="wait a moment")
    if status in (502, 503, 504):
        return UnreachableError("the hub is not there", cause=cause, next="wait, or look at the proxy in front of it")
    return ProtocolError("the hub's answer cannot be understood", cause=cause, next="check the address")

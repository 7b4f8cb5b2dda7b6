"""The port at which other nodes dial this one directly, where its owner wants that: read-only, small, last in line.

Only nodes with a certificate of the same authority get past the handshake, and of those none that the hub has revoked.
Two are served at once, by threads of low priority in the agent; who comes third is sent away and asks the hub.

GET /health, GET and POST /v1/node/probe         as at the hub, so that a link can be measured
GET /v1/peer/snapshot/<content>                  a snapshot by what is in it (ledger.content), with Range
"""

import logging
import os
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import msgspec

from ciuic import __version__
from ciuic.errors import CertificateError, CiuicError, NotFoundError, OverloadedError, ProtocolError, error_to_dict
from ciuic.ledger.content import CONTENT
from ciuic.net.peer_messages import PEER_SNAPSHOT
from ciuic.net.probe import LARGEST_BYTES
from ciuic.net.tls import Identity, identity_from_der, peer_context
from ciuic.node.identity import NodeIdentity
from ciuic.units import format_bytes

SERVED_AT_ONCE = 2
HANDSHAKES_AT_ONCE = 8
SILENCE_S = 10.0
"""Without a byte for so long a connection ends."""
PIECE_BYTES = 256 * 1024
NICENESS = 10
PROBE_PATH = "/v1/node/probe"
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")
_log = logging.getLogger(__name__)


class PeerServer(ThreadingHTTPServer):
    """One thread per connection."""

    daemon_threads = True
    request_queue_size = HANDSHAKES_AT_ONCE
    allow_reuse_address = True

    def __init__(
        self,
        place: tuple[str, int],
        identity: NodeIdentity,
        *,
        path_of: Callable[[str], Path | None],
        is_busy: Callable[[], bool],
    ) -> None:
        """Binds. `path_of(content)` finds a snapshot. Raises OSError, CertificateError."""
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        self.path_of, self.is_busy = path_of, is_busy
        self.revoked: frozenset[str] = frozenset()
        """Serial numbers, as the hub told them last."""
        self._identity = identity
        self._authority_pem = identity.authority.read_bytes()
        self._stamp = self._look()
        self._context = peer_context(identity.cert, identity.key, self._authority_pem)
        self._doors = threading.BoundedSemaphore(HANDSHAKES_AT_ONCE)
        self.seats = threading.BoundedSemaphore(SERVED_AT_ONCE)
        super().__init__(place, PeerHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """On the listener's thread: never waits."""
        if self._doors.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """On the connection's thread."""
        _be_nice()
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._doors.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handshake, then the requests. Raises OSError."""
        request.settimeout(SILENCE_S)
        secured = self._present_context().wrap_socket(request, server_side=True)
        try:
            super().finish_request(cast("Any", secured), client_address)
        finally:
            with suppress(OSError):
                secured.unwrap()
            secured.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who breaks off, or has no certificate, is no news; anything else is a bug and is told."""
        error = sys.exception()
        if isinstance(error, OSError | CertificateError):
            _log.info("a direct connection from %s ended: %s", client_address[0], error)
        else:
            _log.warning("a direct connection from %s failed", client_address[0], exc_info=True)

    def check(self, caller: Identity) -> None:
        """May this one ask? Raises CertificateError."""
        if caller.role != "node":
            raise CertificateError(f"{caller.name} is no node", cause="only nodes are served here", next="ask the hub")
        if caller.serial in self.revoked:
            raise CertificateError(f"the certificate of {caller.name} was revoked", next="ask the operator")

    def _look(self) -> tuple[int, int]:
        status = self._identity.cert.stat()
        return status.st_ino, status.st_mtime_ns

    def _present_context(self) -> ssl.SSLContext:
        """With the certificate as it is now: it is renewed from time to time."""
        if (stamp := self._look()) != self._stamp:
            self._context = peer_context(self._identity.cert, self._identity.key, self._authority_pem)
            self._stamp = stamp
        return self._context


def _be_nice() -> None:
    """This thread goes last: training is what the machine is for."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class PeerHandler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = f"ciuic-node/{__version__}"
    sys_version = ""
    disable_nagle_algorithm = True

    @property
    def _peers(self) -> PeerServer:
        return cast("PeerServer", self.server)

    def handle(self) -> None:
        """All requests of the connection, when there is a seat."""
        self._sent_bytes = 0
        der = cast("ssl.SSLSocket", self.connection).getpeercert(binary_form=True) or b""
        self._caller = identity_from_der(der)
        self._has_seat = self._peers.seats.acquire(blocking=False)
        try:
            super().handle()
        finally:
            if self._has_seat:
                self._peers.seats.release()
            if self._sent_bytes:
                _log.info("%s took %s of snapshots from here", self._caller.name, format_bytes(self._sent_bytes))

    def do_GET(self) -> None:
        """See the module."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """See the module."""
        self._answer(self._post)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's own name
        """Nothing per request."""

    def _answer(self, work: Callable[[], None]) -> None:
        try:
            self._peers.check(self._caller)
            if not self._has_seat:
                raise OverloadedError("this node serves others already", next="ask the hub")
            work()
        except CiuicError as error:
            self.close_connection = True
            self._say(_status_of(error), msgspec.json.encode({"error": error_to_dict(error)}))

    def _get(self) -> None:
        parts = urlsplit(self.path)
        place, _, content = parts.path.rpartition("/")
        if place == PEER_SNAPSHOT and CONTENT.fullmatch(content):
            self._send_snapshot(content)
        elif parts.path == "/health":
            self._say(200, msgspec.json.encode({"ok": True, "version": __version__}))
        elif parts.path == PROBE_PATH:
            self._check_probe()
            count = parse_qs(parts.query).get("bytes", ["0"])[0]
            if not _is_amount(count):
                raise ProtocolError(f"a probe moves at most {LARGEST_BYTES} bytes")
            self._begin(200, int(count))
            for start in range(0, int(count), PIECE_BYTES):
                self.wfile.write(os.urandom(min(PIECE_BYTES, int(count) - start)))
        else:
            raise NotFoundError("there is nothing under this path", next="use the same version of ciuic on both sides")

    def _post(self) -> None:
        length = self.headers.get("Content-Length", "")
        if urlsplit(self.path).path != PROBE_PATH:
            raise NotFoundError("nothing is taken under this path", cause="a node only gives")
        self._check_probe()
        if not _is_amount(length):
            raise ProtocolError(f"a probe moves at most {LARGEST_BYTES} bytes", cause=f"announced: {length[:20]!r}")
        left = int(length)
        while left and (piece := self.rfile.read(min(left, PIECE_BYTES))):
            left -= len(piece)
        self._say(200, msgspec.json.encode({"bytes": int(length) - left}))

    def _check_probe(self) -> None:
        if self._peers.is_busy():
            raise OverloadedError("this node works and does not measure links now", next="ask again when it is idle")

    def _send_snapshot(self, content: str) -> None:
        path = self._peers.path_of(content)
        try:
            file = None if path is None else path.open("rb")
        except OSError:  # replaced by a newer one
            file = None
        if file is None:
            raise NotFoundError("this node does not hold that snapshot", cause="it has a newer one", next="ask the hub")
        with file:
            total = os.fstat(file.fileno()).st_size
            start, stop = self._span(total)
            self._begin(206, stop - start, f"bytes {start}-{stop - 1}/{total}")
            while start < stop:
                piece = os.pread(file.fileno(), min(PIECE_BYTES, stop - start), start)
                if not piece:
                    self.close_connection = True
                    return
                self.wfile.write(piece)
                start += len(piece)
                self._sent_bytes += len(piece)

    def _span(self, total: int) -> tuple[int, int]:
        """[start, stop) that is asked for. Raises ProtocolError."""
        wanted = self.headers.get("Range", "")
        match = _RANGE.fullmatch(wanted)
        first, last = (int(match[1]), int(match[2])) if match else (0, total - 1)
        if (wanted and not match) or not 0 <= first <= last < total:
            raise ProtocolError(f"{wanted[:60]!r} is no part of {total} bytes")
        return first, last + 1

    def _begin(self, status: int, count: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(count))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _is_amount(text: str) -> bool:
    """A number of bytes that a probe may move."""
    return text.isascii() and text.isdigit() and len(text) <= 12 and int(text) <= LARGEST_BYTES


def _status_of(error: CiuicError) -> int:
    kinds = ((CertificateError, 403), (NotFoundError, 404), (OverloadedError, 429))
    return next((status for kind, status in kinds if isinstance(error, kind)), 400)

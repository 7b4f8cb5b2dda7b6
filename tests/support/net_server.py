"""A small real HTTPS server that speaks the few endpoints the client and the agent need.

Real sockets, real TLS, real certificates of a real authority; what is missing is the ledger. A test changes the
desired state (`assign`, `stop_worker`) and awaits what the agent reports (`wait_for_beat`). `misbehave` scripts faults.
"""

import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ciuic.errors import CertificateError, CiuicError, NotFoundError, SupersededError, TokenError, error_to_dict
from ciuic.net.messages import (
    Assignment,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LogLine,
    LogRequest,
    Ok,
    Role,
    decode,
    encode,
)
from ciuic.net.tls import Authority, Identity, identity_from_der, server_context, write_private_file
from ciuic.net.tokens import make_token, new_token_secret

DEADLINE_S = 30.0


class SmallHub:
    """The state behind the endpoints, and the server itself; survives `stop` and `start` like a hub with a database."""

    def __init__(self, folder: Path, *, names: list[str] | None = None) -> None:
        self.folder = folder
        self.authority = Authority.create(folder)
        cert_pem, key_pem = self.authority.issue_server(names or [])
        self.use_certificate(cert_pem, key_pem)
        self.changed = threading.Condition()
        self.beats: list[HeartbeatRequest] = []
        self.lines: list[LogLine] = []
        self.left: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.identities: list[Identity | None] = []
        self.secrets: dict[str, str] = {}
        self.joined = 0
        self.revision = 1
        self.assignment: Assignment | None = None
        self.stopping = False
        self.refuse: CiuicError | None = None
        self.check: Callable[[HeartbeatRequest], None] = lambda beat: None
        """May raise what a heartbeat is to be answered with."""
        self.check_logs: Callable[[LogRequest], None] = lambda request: None
        self.files: dict[str, bytes] = {}
        self.misbehave: Callable[[BaseHTTPRequestHandler], bool] | None = None
        """Called first for each request; True: it did everything itself."""
        self.boot_id = ""
        self.port = 0
        self._server: _Server | None = None

    # ---- life ----

    def use_certificate(self, cert_pem: bytes, key_pem: bytes) -> None:
        write_private_file(self.folder / "hub.pem", cert_pem)
        write_private_file(self.folder / "hub.key", key_pem)

    def start(self, host: str = "127.0.0.1") -> "SmallHub":
        context = server_context(self.folder / "hub.pem", self.folder / "hub.key", self.authority.certificate_pem)
        self._server = _Server(self, context, (host, self.port))
        self.port = self._server.server_address[1]
        self.boot_id = os.urandom(4).hex()
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Like a kill: the listener and every connection are gone at once."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.cut_all()
            self._server = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def token(self) -> str:
        token_id, secret = new_token_secret()
        self.secrets[token_id] = secret
        return make_token(url=self.url, authority_fingerprint=self.authority.fingerprint, id=token_id, secret=secret)

    def client_files(self, role: Role = "operator", name: str = "alice") -> tuple[Path, Path]:
        cert_pem, key_pem = self.authority.issue_client(None, common_name=name, role=role)
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        write_private_file(cert, cert_pem)
        write_private_file(key, key_pem)
        return cert, key

    # ---- desired state and what is awaited ----

    def assign(self, assignment: Assignment | None, *, stop_worker: bool = False) -> None:
        with self.changed:
            self.assignment, self.stopping = assignment, stop_worker
            self.revision += 1
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        with self.changed:
            if not self.changed.wait_for(condition, deadline_s):
                raise AssertionError(f"not seen within {deadline_s} s: {what}; last beats {self.beats[-2:]}")

    def wait_for_beat(self, condition: Callable[[HeartbeatRequest], bool], what: str) -> HeartbeatRequest:
        """The first beat from now on (or the latest one) that fulfils the condition."""
        with self.changed:
            start = max(0, len(self.beats) - 1)
            self.wait_for(lambda: any(condition(beat) for beat in self.beats[start:]), what)
            return next(beat for beat in self.beats[start:] if condition(beat))

    # ---- endpoints ----

    def join(self, request: JoinRequest) -> JoinReply:
        if self.secrets.pop(request.token_id, None) != request.secret:
            raise TokenError("the join token is not valid", cause="it is used up, expired or of another hub")
        self.joined += 1
        name = request.location if self.joined == 1 else f"{request.location}-{self.joined}"
        cert_pem, _ = self.authority.issue_client(request.csr_pem, common_name=name, role="node")
        return JoinReply(node_id=name, certificate_pem=cert_pem.decode())

    def beat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self.check(request)
        with self.changed:
            if self.beats and request.agent_incarnation in self.superseded():
                raise SupersededError("another process speaks for this node now")
            self.beats.append(request)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.revision != request.known_revision or self.refuse, request.wait_s)
            if self.refuse:
                raise self.refuse
            return HeartbeatReply(
                boot_id=self.boot_id,
                epoch=1,
                revision=self.revision,
                assignment=self.assignment,
                stop_worker=self.stopping,
                heartbeat_s=0.3,
                hub_time=time.time(),
            )

    def superseded(self) -> set[str]:
        return {beat.agent_incarnation for beat in self.beats} - {self.beats[-1].agent_incarnation}

    def take_logs(self, request: LogRequest) -> Ok:
        self.check_logs(request)
        with self.changed:
            self.lines.extend(request.lines)
            self.changed.notify_all()
        return Ok()

    def take_leave(self, identity: Identity) -> Ok:
        with self.changed:
            self.left.append(identity.name)
            self.changed.notify_all()
        return Ok()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: SmallHub, context: ssl.SSLContext, address: tuple[str, int]) -> None:
        self.hub = hub
        self.context = context
        self.live: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, object]:
        raw, address = super().get_request()
        wrapped = self.context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        self.live.add(wrapped)
        return wrapped, address

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        if isinstance(request, socket.socket):
            self.live.discard(request)
        super().shutdown_request(request)

    def cut_all(self) -> None:
        for connection in list(self.live):
            cut(connection)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away, or fails the handshake, is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_GET  # noqa: N815 - the names that http.server wants
    do_PUT = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""

    def _serve(self) -> None:
        hub, parts = _hub_of(self), urlsplit(self.path)
        hub.requests.append((self.command, self.path))
        if hub.misbehave is not None and hub.misbehave(self):
            return
        self.body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        try:
            self._route(hub, parts.path, {key: values[0] for key, values in parse_qs(parts.query).items()})
        except CiuicError as error:
            status = {3: 401, 2: 400, 5: 400}.get(error.exit_code, 500)
            answer(self, json.dumps({"error": error_to_dict(error)}).encode(), status=status)

    def _route(self, hub: SmallHub, path: str, query: dict[str, str]) -> None:
        if path == "/health":
            return answer(self, json.dumps({"ok": True, "boot_id": hub.boot_id, "version": "0"}).encode())
        if path == "/ca.pem":
            return answer(self, hub.authority.certificate_pem)
        if path == "/v1/join":
            return answer(self, encode(hub.join(decode(self.body, JoinRequest))))
        identity = self._identity()
        hub.identities.append(identity)
        if path == "/v1/node/heartbeat":
            return answer(self, encode(hub.beat(decode(self.body, HeartbeatRequest))))
        if path == "/v1/node/logs":
            return answer(self, encode(hub.take_logs(decode(self.body, LogRequest))))
        if path == "/v1/node/leave":
            return answer(self, encode(hub.take_leave(identity)))
        if path == "/v1/node/probe" and self.command == "POST":
            return answer(self, json.dumps({"bytes": len(self.body)}).encode())
        if path == "/v1/node/probe":
            return answer(self, os.urandom(int(query["bytes"])))
        if path == "/echo":
            return answer(self, self.body)
        if path in hub.files:
            return self._file(hub.files[path])
        raise NotFoundError(f"there is no {path}")

    def _identity(self) -> Identity:
        der = self.connection.getpeercert(binary_form=True)
        if der is None:
            raise CertificateError("this needs a client certificate")
        return identity_from_der(der)

    def _file(self, content: bytes) -> None:
        wanted = self.headers.get("Range")
        if wanted is None:
            return answer(self, content)
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        return answer(self, content[start:], status=206, headers=headers)


def _hub_of(handler: BaseHTTPRequestHandler) -> SmallHub:
    if not isinstance(handler.server, _Server):
        raise TypeError(f"{handler.server} is not the small hub's server")
    return handler.server.hub


def answer(
    handler: BaseHTTPRequestHandler, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """A whole answer in one write."""
    lines = {"Content-Length": str(len(body)), "Date": formatdate(usegmt=True), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    handler.wfile.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)


def cut(connection: socket.socket) -> None:
    """End a TCP connection under the TLS layer, at once and for all threads."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)

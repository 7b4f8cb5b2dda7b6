"""`ciuic dash`: a small HTTP proxy on this machine that shows the operator's certificate to the hub.

The browser needs no certificate and never sees one. Because whoever reaches the proxy reads what the operator may read,
it listens on 127.0.0.1 only, passes on nothing but GET, and answers

- only requests for this machine by name (another site whose name is made to point here is refused: DNS rebinding),
- only pages of its own (what other sites embed or fetch is refused, whatever the browser would show them),
- where the kernel tells (Linux), only processes of the same user.

Answers are passed on piece by piece, so the event stream of the live page flows.
"""

import html
import http.client
import json
import os
import signal
import sys
import threading
import webbrowser
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from ciuic import __version__
from ciuic.cli.output import print_line, print_note
from ciuic.cli.profile import ClientProfile
from ciuic.errors import CiuicError, RoleError, UnreachableError, UsageError, error_from_dict, error_to_dict
from ciuic.net.client import HubClient
from ciuic.net.connection import DEAD_KEEP_ALIVE, NETWORK_ERRORS, HubConnection, explain
from ciuic.net.messages import HubInfo
from ciuic.net.tls import client_context
from ciuic.net.url import parse_hub_url

ADDRESS = "127.0.0.1"
OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Any port: an ssh tunnel may end on another one."""
SILENCE_S = 20.0
"""The hub's streams tell every few seconds that they are alive."""
FIRST_LOOK_S = 5.0
PIECE_BYTES = 64 * 1024
MAX_ERROR_BYTES = 64 * 1024
PASSED_UP = ("accept", "accept-encoding", "if-none-match")
NOT_PASSED_DOWN = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"})
ALWAYS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
NO_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>ciuic: no live page</title>
<h1>no live page yet</h1><p>{message}</p><p>{cause}</p><p>next: {next}</p><p>this page tries again every 3 s</p></html>
"""


def run_dash(profile: ClientProfile, port: int, open_browser: bool = True) -> int:
    """Serve the live page at http://127.0.0.1:port/ until ctrl-c or SIGTERM; port 0 takes a free one.

    `open_browser`: also show it, where this is a terminal on a desktop. Raises UsageError (port taken),
    CertificateError and RoleError (the hub does not let this certificate look); a hub that is away is waited for.
    """
    _check_access(profile)
    with _listen(profile, port) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        address = f"http://{ADDRESS}:{server.server_port}/"
        print_line(f"live page at {address}  (of {profile.url}; ctrl-c ends this)")
        if open_browser and _has_desktop():
            webbrowser.open(address)
        _wait_for_signal()
        server.shutdown()
    return 0


def _check_access(profile: ClientProfile) -> None:
    client = HubClient(
        profile.url, profile.authority.read_bytes(), profile.cert, profile.key, "operator", timeout_s=FIRST_LOOK_S
    )
    try:
        client.call("GET", "/v1/hub", None, HubInfo)
    except UnreachableError as error:
        print_note(f"{error.message} ({error.cause}); the page waits for it")
    finally:
        client.close()


def _listen(profile: ClientProfile, port: int) -> "DashServer":
    try:
        return DashServer(profile, port)
    except OSError as error:
        raise UsageError(
            f"the live page cannot use port {port} of this machine",
            cause=(error.strerror or str(error)).lower(),
            next="choose another one with --port; 0 takes a free one",
        ) from error


def _has_desktop() -> bool:
    """A browser that opens here is seen by a person (and is not a text browser that takes over the terminal)."""
    is_shown = sys.platform in ("darwin", "win32") or any(os.environ.get(x) for x in ("DISPLAY", "WAYLAND_DISPLAY"))
    return sys.stdout.isatty() and is_shown


def _wait_for_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()


class DashServer(ThreadingHTTPServer):
    """One thread per connection of the browser, each with its own connection to the hub."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, profile: ClientProfile, port: int) -> None:
        """Binds. Raises OSError."""
        self.hub = parse_hub_url(profile.url)
        self._context = client_context(profile.authority.read_bytes(), profile.cert, profile.key, "operator")
        super().__init__((ADDRESS, port), DashHandler)

    def connect(self) -> HubConnection:
        """A connection to the hub that is opened with its first request."""
        return HubConnection(self.hub, self._context, SILENCE_S)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Only processes of this user: on a shared machine others must not read with the operator's certificate."""
        owner = owner_of_connection(client_address[1], self.server_port)
        return owner is None or owner == os.getuid()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no news; anything else is a bug and is shown."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def owner_of_connection(client_port: int, server_port: int, tables: Path = Path("/proc/net")) -> int | None:
    """User id of the process at the client's end of a loopback connection; None where the kernel does not tell."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (tables / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            here, there = (int(end.rpartition(":")[2], 16) for end in fields[1:3])
            if (here, there) == (client_port, server_port):
                return int(fields[7])
    return None


class DashHandler(BaseHTTPRequestHandler):
    """One connection of the browser."""

    protocol_version = "HTTP/1.1"
    server_version = f"ciuic-dash/{__version__}"
    sys_version = ""
    timeout = 300

    def setup(self) -> None:
        super().setup()
        self._connection: HubConnection | None = None

    @property
    def _dash(self) -> DashServer:
        return cast("DashServer", self.server)

    def finish(self) -> None:
        self._drop_hub()
        super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's own name
        """Nothing: the terminal belongs to the person."""

    def parse_request(self) -> bool:
        """Refuse what is not a plain GET from this machine before any handler is chosen."""
        if not super().parse_request():
            return False
        refusal = self._refusal()
        if refusal is None:
            return True
        self.close_connection = True
        self._answer_error(refusal[0], RoleError(refusal[1], next="open the address that `ciuic dash` printed"))
        return False

    def _refusal(self) -> tuple[HTTPStatus, str] | None:
        if self.command != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, f"the live page only reads: {self.command[:20]} is not passed on"
        if "content-length" in self.headers or "transfer-encoding" in self.headers:
            return HTTPStatus.BAD_REQUEST, "a GET has no body"
        hosts = self.headers.get_all("host") or []
        if len(hosts) != 1 or _host_name(hosts[0]) not in OWN_NAMES:
            return HTTPStatus.MISDIRECTED_REQUEST, "this is not the host that the request is for"
        if not self.path.startswith("/"):
            return HTTPStatus.BAD_REQUEST, "the path must start with a slash"
        is_link = self.headers.get("sec-fetch-mode") == "navigate" and self.headers.get("sec-fetch-dest") == "document"
        if self.headers.get("sec-fetch-site", "none") in ("cross-site", "same-site") and not is_link:
            return HTTPStatus.FORBIDDEN, "another site may not read from the live page"
        return None

    def do_GET(self) -> None:
        try:
            response = self._ask_hub()
        except CiuicError as error:
            self._drop_hub()
            self._answer_error(HTTPStatus.BAD_GATEWAY, error)
            return
        if response.status >= HTTPStatus.BAD_REQUEST and self._wants_page:
            self._answer_error(HTTPStatus(response.status), _error_in(response))
            self._drop_hub()
        else:
            self._pass_on(response)

    @property
    def _wants_page(self) -> bool:
        return urlsplit(self.path).path == "/"

    def _ask_hub(self) -> http.client.HTTPResponse:
        """Raises UnreachableError and CertificateError. A kept-alive connection that died meanwhile is opened again."""
        headers = {name: value for name in PASSED_UP if (value := self.headers.get(name)) is not None}
        was_open = self._connection is not None
        try:
            return self._ask(headers)
        except DEAD_KEEP_ALIVE as error:
            self._drop_hub()
            if not was_open:
                raise explain(error, self._dash.hub, SILENCE_S) from error
        except NETWORK_ERRORS as error:
            raise explain(error, self._dash.hub, SILENCE_S) from error
        try:
            return self._ask(headers)
        except NETWORK_ERRORS as error:
            raise explain(error, self._dash.hub, SILENCE_S) from error

    def _ask(self, headers: dict[str, str]) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = self._dash.connect()
        self._connection.request("GET", self.path, headers=headers)
        return self._connection.getresponse()

    def _pass_on(self, response: http.client.HTTPResponse) -> None:
        """Head and body, as they come. A body that the hub cuts short is cut short here too."""
        has_body = response.status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
        is_chunked = has_body and response.length is None
        self.send_response(response.status)
        passed = {name.lower(): value for name, value in response.getheaders() if name.lower() not in NOT_PASSED_DOWN}
        for name, value in {**ALWAYS, **passed}.items():
            self.send_header(name, value)
        if is_chunked:
            self.send_header("transfer-encoding", "chunked")
        elif has_body:
            self.send_header("content-length", str(response.length))
        self.end_headers()
        try:
            for piece in _pieces(response):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
            if is_chunked:
                self.wfile.write(b"0\r\n\r\n")
        except NETWORK_ERRORS:  # of either side; a half answer must not look whole
            self.close_connection = True
            self._drop_hub()

    def _answer_error(self, status: HTTPStatus, error: CiuicError) -> None:
        """JSON for the page's scripts; a small page that tries again where the live page itself was asked for."""
        if self._wants_page:
            words = {name: html.escape(str(value)) for name, value in error_to_dict(error).items()}
            body, kind = NO_PAGE.format(**words).encode(), "text/html; charset=utf-8"
        else:
            body, kind = json.dumps({"error": error_to_dict(error)}).encode(), "application/json"
        headers = {**ALWAYS, "content-type": kind, "content-length": str(len(body)), "cache-control": "no-store"}
        headers["content-security-policy"] = "default-src 'none'; frame-ancestors 'none'"
        if self._wants_page and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            headers["refresh"] = "3"
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = "GET"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _drop_hub(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _host_name(host: str) -> str:
    """`127.0.0.1` of `127.0.0.1:8450`."""
    name, separator, port = host.strip().lower().rpartition(":")
    return name if separator and port.isdigit() else host.strip().lower()


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """As they come of a stream. Raises HTTPException when the body is cut short."""
    read = response.read1 if response.chunked else response.read
    while piece := read(PIECE_BYTES):
        yield piece
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)


def _error_in(response: http.client.HTTPResponse) -> CiuicError:
    """What the hub said in an error answer."""
    try:
        return error_from_dict(json.loads(response.read(MAX_ERROR_BYTES))["error"])
    except (*NETWORK_ERRORS, ValueError, KeyError, TypeError):
        return UnreachableError(
            "the hub's answer cannot be understood", cause=f"HTTP status {response.status}", next="check the address"
        )

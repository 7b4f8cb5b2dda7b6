"""Every endpoint of a hub and a shard, taken from the programs themselves; and strangers on raw sockets."""

import re
import socket
import ssl
import time
from pathlib import Path

from hub_process import HubProcess, NodeOnWire
from starlette.routing import Route

from ciuic.hub.access.auth import prepare_folder
from ciuic.hub.api.view import HubFacts
from ciuic.hub.config import HubConfig
from ciuic.hub.core import Hub
from ciuic.hub.keeping.store import Store
from ciuic.hub.page.routes import page_routes
from ciuic.hub.run.rounds import RunLedger
from ciuic.hub.server import HubServer

Endpoint = tuple[str, str]
"""(method, path)."""


def hub_endpoints(folder: Path) -> list[Endpoint]:
    """Every endpoint that a hub registers, with something in the place of each parameter."""
    config = HubConfig(home=folder, host="127.0.0.1", port=0)
    files = prepare_folder(config.folder, [])
    hub = Hub(config, Store(config.folder / "ciuic.db"), files.authority, RunLedger.open)
    try:
        server = HubServer(hub, HubFacts(url="https://127.0.0.1:1", version="0"), files, page_routes)
        return endpoints_of(server.routes)
    finally:
        hub.stop()


def endpoints_of(routes: list[Route]) -> list[Endpoint]:
    """(method, path) of each route."""
    found = {
        (method, re.sub(r"\{[^}]*\}", "some-1", route.path))
        for route in routes
        for method in sorted(route.methods or {"GET"})
    }
    return sorted(found)


def dial(hub: HubProcess, node: NodeOnWire | None = None, *, timeout_s: float = 30.0) -> ssl.SSLSocket:
    """A TLS connection, with a node's certificate or without any."""
    context = ssl.create_default_context(cadata=(hub.home / "operator" / "authority.pem").read_text())
    if node is not None:
        context.load_cert_chain(node.folder / "node.pem", node.folder / "node.key")
    plain = socket.create_connection(("127.0.0.1", hub.port), timeout=timeout_s)
    return context.wrap_socket(plain, server_hostname="localhost")


def ask(stream: ssl.SSLSocket, method: str, path: str, *headers: str) -> tuple[int, bytes]:
    """One request without a body, whatever its headers announce; (status, body) of the answer."""
    head = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers])
    stream.sendall(head.encode() + b"\r\n\r\n")
    received = b""
    while b"\r\n\r\n" not in received:
        piece = stream.recv(65536)
        if not piece:
            raise ConnectionError(f"the connection ended after {received!r}")
        received += piece
    head_bytes, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head_bytes.lower())
    while method != "HEAD" and length is not None and len(body) < int(length.group(1)):
        body += stream.recv(65536)
    return int(head_bytes.split()[1]), body


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file below `folder`; but of the one with which a hub shows that it lives."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "alive"
    }


def cpu_s(process_id: int) -> float:
    """Processor time of a process so far."""
    import psutil

    times = psutil.Process(process_id).cpu_times()
    return times.user + times.system


def until_closed(stream: ssl.SSLSocket, within_s: float) -> float:
    """How long it takes until the other side ends the connection; fails when it does not."""
    began = time.monotonic()
    stream.settimeout(within_s)
    try:
        while stream.recv(65536):
            continue
    except (ConnectionError, ssl.SSLError):
        pass
    return time.monotonic() - began

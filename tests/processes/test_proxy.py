"""The way to the hub through a real CONNECT proxy, with and without a password."""

import base64
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from net_server import SmallHub

from ciuic.errors import UnreachableError
from ciuic.net.client import HubClient
from ciuic.net.probe import Health

NAME = "hub.test"


class ConnectProxy:
    """Makes tunnels to 127.0.0.1, whatever the name; refuses callers without the right password."""

    def __init__(self, password: str = "") -> None:
        self.wanted = f"Basic {base64.b64encode(password.encode()).decode()}" if password else ""
        self.heads: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += near.recv(4096)
            self.heads.append(head.decode())
            if self.wanted and self.wanted not in self.heads[-1]:
                near.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                return
            port = int(head.split()[1].rpartition(b":")[2])
            with socket.create_connection(("127.0.0.1", port)) as far:
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=_copy, args=(far, near), daemon=True)
                back.start()
                _copy(near, far)
                back.join(10)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    (tmp_path / "hub").mkdir()
    made = SmallHub(tmp_path / "hub", names=[NAME]).start()
    yield made
    made.stop()


@pytest.fixture
def proxy() -> Iterator[ConnectProxy]:
    made = ConnectProxy("ann:s@cret")
    yield made
    made.close()


def connect(hub: SmallHub) -> HubClient:
    return HubClient(f"https://{NAME}:{hub.port}", hub.authority.certificate_pem, timeout_s=10)


def test_everything_goes_through_the_tunnel_with_tls_from_end_to_end(
    hub: SmallHub, proxy: ConnectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://ann:s%40cret@127.0.0.1:{proxy.port}")
    client = connect(hub)
    assert client.call("GET", "/health", None, Health).ok
    assert client.call("GET", "/health", None, Health).ok
    client.close()
    assert len(proxy.heads) == 1, "the tunnel is kept"
    assert proxy.heads[0].startswith(f"CONNECT {NAME}:{hub.port} HTTP/1.")


def test_a_refused_password_is_told_without_the_password(
    hub: SmallHub, proxy: ConnectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://ann:wrong@127.0.0.1:{proxy.port}")
    with pytest.raises(UnreachableError, match="the proxy at") as refused:
        connect(hub).call("GET", "/health", None, Health)
    assert "407" in refused.value.cause
    assert "wrong" not in str(refused.value)


def test_a_proxy_that_is_not_there_is_named(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
    with pytest.raises(UnreachableError, match=f"proxy at http://127.0.0.1:{port} cannot be reached"):
        connect(hub).call("GET", "/health", None, Health)


def test_hosts_in_no_proxy_are_reached_directly(
    hub: SmallHub, proxy: ConnectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("NO_PROXY", NAME)
    with pytest.raises(UnreachableError, match="cannot be resolved"):
        connect(hub).call("GET", "/health", None, Health)
    assert proxy.heads == []

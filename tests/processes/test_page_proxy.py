"""`ciuic dash` beside a real hub: what it passes on, what it refuses, and what it says when the hub is away."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.cli_world import command, program_environment
from support.hub_process import HubProcess, eventually
from support.page_world import Dash

from ciuic.cli.dash_proxy import owner_of_connection
from ciuic.hub.page.routes import SECURITY_HEADERS


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("page-proxy") / "home") as hub:
        yield hub


@pytest.fixture(scope="module")
def dash(hub: HubProcess) -> Iterator[Dash]:
    dash = Dash(hub.home)
    yield dash
    dash.end(signal.SIGKILL)


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def error(self) -> dict[str, str]:
        return json.loads(self.body)["error"]


def ask(port: int, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
    wire = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, body=body, headers=wire)
        return Answer(connection.getresponse())


def test_it_says_where_the_page_is_and_listens_on_this_machine_only(dash: Dash, hub: HubProcess) -> None:
    assert dash.line.strip() == f"live page at http://127.0.0.1:{dash.port}/  (of {hub.url}; ctrl-c ends this)"
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", dash.port))


def test_the_page_comes_with_its_security_headers(dash: Dash) -> None:
    page = ask(dash.port, "/")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b"<title>ciuic</title>" in page.body
    assert SECURITY_HEADERS.items() <= page.headers.items()
    assert page.headers["x-frame-options"] == "DENY"


def test_what_the_operator_may_read_is_passed_on(dash: Dash, hub: HubProcess) -> None:
    info = json.loads(ask(dash.port, "/v1/hub").body)
    assert info["url"] == hub.url
    assert json.loads(ask(dash.port, "/api/state").body)["hub"]["boot_id"] == info["boot_id"]
    assert b"ciuic_nodes" in ask(dash.port, "/metrics").body
    assert ask(dash.port, "/v1/hub").headers["x-content-type-options"] == "nosniff"


def test_the_chart_library_is_asked_for_once(dash: Dash) -> None:
    first = ask(dash.port, "/assets/plotly.min.js", accept_encoding="gzip")
    assert first.status == 200
    assert first.headers["content-encoding"] == "gzip"
    assert 500_000 < len(first.body) < 3_000_000
    again = ask(dash.port, "/assets/plotly.min.js", accept_encoding="gzip", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")


def test_a_kept_connection_serves_many_requests(dash: Dash) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", dash.port, timeout=30)) as connection:
        for path in ("/", "/assets/style.css", "/v1/nodes", "/v1/nothing", "/v1/hub"):
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            assert response.status == (404 if path == "/v1/nothing" else 200)


def hub_requests(hub: HubProcess) -> dict[str, float]:
    """How often each path of the hub was asked for."""
    text = hub.operator().fetch("/metrics").decode()
    lines = re.findall(r'^ciuic_hub_requests_total\{path="([^"]+)",status="\d+"\} (\S+)$', text, flags=re.MULTILINE)
    return {path: sum(float(number) for other, number in lines if other == path) for path, _ in lines}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "CONNECT", "NONSENSE"])
def test_nothing_but_get_is_passed_on(dash: Dash, hub: HubProcess, method: str) -> None:
    asked = dict(hub_requests(hub))
    answer = ask(dash.port, "/v1/tokens", method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET"
    assert hub_requests(hub).get("/v1/tokens") == asked.get("/v1/tokens")


def test_a_get_with_a_body_is_refused(dash: Dash) -> None:
    assert ask(dash.port, "/v1/hub", body=b"{}").status == 400


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8450", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:1", ""]
)
def test_another_name_for_this_machine_is_refused(dash: Dash, host: str) -> None:
    answer = ask(dash.port, "/api/state", host=host)
    assert answer.status == 421
    assert "not the host" in answer.error["message"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "LOCALHOST", "[::1]:8450"])
def test_this_machine_may_be_called_by_its_own_names(dash: Dash, host: str) -> None:
    assert ask(dash.port, "/v1/hub", host=host).status == 200


@pytest.mark.parametrize(
    "head", [b"GET /v1/hub HTTP/1.1\r\n\r\n", b"GET /v1/hub HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"]
)
def test_no_host_and_two_hosts_are_refused(dash: Dash, head: bytes) -> None:
    assert raw(dash.port, head).startswith(b"HTTP/1.1 421 ")


@pytest.mark.parametrize("path", [b"http://evil.example/", b"nothing", b"*"])
def test_a_path_is_a_path(dash: Dash, path: bytes) -> None:
    assert raw(dash.port, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_two_slashes_do_not_name_another_host(dash: Dash) -> None:
    answer = raw(dash.port, b"GET //evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")  # asked of the hub as a path like any other


def raw(port: int, head: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head)
        return connection.recv(65536)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_other_sites_embed_or_fetch_is_refused(dash: Dash, site: str) -> None:
    assert ask(dash.port, "/v1/hub", sec_fetch_site=site, sec_fetch_mode="no-cors").status == 403
    frame = ask(dash.port, "/", sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="iframe")
    assert frame.status == 403
    link = ask(dash.port, "/", sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="document")
    assert link.status == 200
    assert ask(dash.port, "/v1/hub", sec_fetch_site="same-origin", sec_fetch_mode="cors").status == 200


def test_the_stream_flows_through(dash: Dash, hub: HubProcess) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", dash.port, timeout=30)) as connection:
        connection.request("GET", "/api/stream?news=1")
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("text/event-stream")
        first = json.loads(response.readline().removeprefix(b"data: "))
        assert first["hub"]["url"] == hub.url
        assert response.readline() == b"\n"
        hub.token()
        news = json.loads(response.readline().removeprefix(b"data: "))
        assert "token.created" in [event["kind"] for event in news["events"]]
        assert news["events"][0]["id"] > first["events"][-1]["id"]
        assert news["cost"]["message_bytes"] > 100
        assert news["cost"]["viewers"] >= 1
        assert news["time"] >= first["time"]


def test_a_quiet_stream_tells_that_it_is_alive(dash: Dash) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", dash.port, timeout=30)) as connection:
        connection.request("GET", "/api/stream")
        response = connection.getresponse()
        for _ in range(20):  # a node of another test may still make some news
            if response.readline() == b"event: alive\n":
                break
        assert response.readline() == b"data: 1\n"


def test_a_stream_ends_when_the_hub_stops_and_another_one_works_after_it_came_back(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as hub:
        dash = Dash(hub.home)
        with closing(http.client.HTTPConnection("127.0.0.1", dash.port, timeout=30)) as connection:
            connection.request("GET", "/api/stream")
            response = connection.getresponse()
            response.readline()
            hub.kill()
            with pytest.raises(http.client.IncompleteRead):  # cut, not ended: nobody may take it for whole
                response.read()
        away = ask(dash.port, "/v1/hub")
        assert away.status == 502
        assert away.error["code"] == "CIUIC-300"
        assert "does not answer" in away.error["message"]
        page = ask(dash.port, "/")
        assert page.status == 502
        assert page.headers["refresh"] == "3"
        assert b"connection refused" in page.body
        hub.start()
        eventually(lambda: ask(dash.port, "/v1/hub").status == 200)
        assert dash.end(signal.SIGTERM) == 0


def test_it_waits_for_a_hub_that_is_not_there_yet(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as hub:
        hub.terminate()
        dash = Dash(hub.home)
        assert ask(dash.port, "/v1/hub").status == 502
        hub.start()
        eventually(lambda: ask(dash.port, "/v1/hub").status == 200)
        assert dash.end(signal.SIGINT) == 0


def test_ctrl_c_ends_it_while_a_page_is_open(hub: HubProcess) -> None:
    dash = Dash(hub.home)
    with closing(http.client.HTTPConnection("127.0.0.1", dash.port, timeout=30)) as connection:
        connection.request("GET", "/api/stream")
        connection.getresponse().readline()
        began_s = time.monotonic()
        assert dash.end(signal.SIGINT) == 0
        assert time.monotonic() - began_s < 10


def test_a_port_that_is_taken_is_said_so(hub: HubProcess, dash: Dash) -> None:
    environment = program_environment(CIUIC_HOME=str(hub.home))
    done = subprocess.run(
        command("dash", "--port", str(dash.port)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"cannot use port {dash.port}" in done.stderr
    assert "next: choose another one with --port" in done.stderr


def test_the_hub_refuses_a_node_that_looks_for_the_page(hub: HubProcess) -> None:
    node = hub.join("us-west")
    with pytest.raises(Exception, match="may not do this"):
        node.client.fetch("/")
    with pytest.raises(Exception, match="may not do this"):
        node.client.fetch("/assets/main.js")


# ---- who is at the other end ---------------------------------------------------------------------------------------


def test_the_kernel_tells_whose_connection_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ports = client.getsockname()[1], server.getsockname()[1]
        assert owner_of_connection(*ports) == os.getuid()
        assert owner_of_connection(ports[1], ports[1]) is None


def test_another_users_connection_is_told_apart(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 0100007F:C350 0100007F:2102 01 00000000:00000000 00:00000000 00000000  1234        0 1 1\n"
    (tmp_path / "tcp").write_text(head + row)
    assert owner_of_connection(0xC350, 0x2102, tmp_path) == 1234
    assert owner_of_connection(0xC351, 0x2102, tmp_path) is None
    mapped = row.replace("0100007F", "0000000000000000FFFF00000100007F").replace("1234", "4321")
    (tmp_path / "tcp").write_text(head)
    (tmp_path / "tcp6").write_text(head + mapped)
    assert owner_of_connection(0xC350, 0x2102, tmp_path) == 4321


def test_a_kernel_that_does_not_tell_is_believed(tmp_path: Path) -> None:
    assert owner_of_connection(1, 2, tmp_path / "nowhere") is None

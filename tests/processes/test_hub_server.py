"""The port itself: held answers, streams, limits, slow and hostile callers, a clean end, kill -9."""

import contextlib
import json
import os
import socket
import sqlite3
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from hub_process import Beating, HubProcess, NodeOnWire, eventually

from ciuic.errors import CertificateError, FrameError, NotFoundError, ProtocolError, UnreachableError
from ciuic.hub.protocol import MAX_HEAD_BYTES
from ciuic.net.messages import Event, HubInfo, LogLine, LogRequest, Ok, RunInfo


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("server") / "home") as running:
        yield running


@pytest.fixture
def own_hub(tmp_path: Path) -> Iterator[HubProcess]:
    """For tests that end it."""
    with HubProcess(tmp_path / "home") as running:
        yield running


def waiting_run(hub: HubProcess) -> str:
    return hub.submit({"name": "waits", "nodes": {"min": 64}})


def raw_connection(hub: HubProcess, node: NodeOnWire | None = None) -> ssl.SSLSocket:
    context = ssl.create_default_context(cadata=(hub.home / "operator" / "authority.pem").read_text())
    if node is not None:
        context.load_cert_chain(node.folder / "node.pem", node.folder / "node.key")
    return context.wrap_socket(
        socket.create_connection(("127.0.0.1", hub.port), timeout=30), server_hostname="localhost"
    )


# ---- heartbeats ----------------------------------------------------------------------------------------------------


def test_a_heartbeat_is_held_while_nothing_changes_and_answered_at_once_when_it_does(hub: HubProcess) -> None:
    node = hub.join("held")
    node.beat()
    began = time.monotonic()
    node.beat(wait_s=0.5)
    assert 0.45 <= time.monotonic() - began < 5.0
    with Beating(node) as beating:
        eventually(lambda: beating.replies)
        run_id = hub.submit({"name": "held", "nodes": {"min": 1, "locations": ["held"]}})
        reply = eventually(lambda: next((r for r in beating.replies if r.assignment is not None), None))
    assert reply.assignment is not None
    assert reply.assignment.run_id == run_id
    assert reply.assignment.job["name"] == "held"
    assert reply.heartbeat_s == 2.0
    assert abs(reply.hub_time - time.time()) < 60
    hub.operator().call("POST", f"/v1/runs/{run_id}/stop", None, Ok)


def test_a_heartbeat_is_not_held_longer_than_the_node_should_be_silent(hub: HubProcess) -> None:
    node = hub.join("eager")
    node.beat()
    began = time.monotonic()
    node.beat(wait_s=25.0)
    assert time.monotonic() - began < 8.0


def test_short_answers_are_not_delayed(hub: HubProcess) -> None:
    """Nagle's algorithm against delayed acknowledgements costs 40 ms per answer when it is left on."""
    node = hub.join("brisk")
    durations_s = []
    for _ in range(30):
        began = time.monotonic()
        node.beat()
        durations_s.append(time.monotonic() - began)
    assert sorted(durations_s)[len(durations_s) // 2] < 0.030


def test_heartbeats_are_not_written(own_hub: HubProcess) -> None:
    node = own_hub.join("quiet")
    for _ in range(3):
        node.beat()
    files = [own_hub.home / "hub" / "ciuic.db", own_hub.home / "hub" / "ciuic.db-wal"]
    before = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    for _ in range(20):
        node.beat()
    assert [(file.stat().st_size, file.stat().st_mtime_ns) for file in files] == before


# ---- logs, events, streams -----------------------------------------------------------------------------------------


def test_logs_are_kept_and_followed_until_the_run_has_ended(hub: HubProcess) -> None:
    node = hub.join("logger")
    run_id = waiting_run(hub)

    def send(*texts: str) -> None:
        lines = [LogLine(time=1.0, rank=0, stream="out", text=text) for text in texts]
        node.client.call("POST", "/v1/node/logs", LogRequest(run_id=run_id, lines=lines), Ok)

    send("one", "two")
    received: list[dict[str, object]] = []

    def follow() -> None:
        lines = hub.operator().stream_lines(f"/v1/runs/{run_id}/logs?follow=1&after=0")
        received.extend(msgspec.json.decode(line) for line in lines)

    thread = threading.Thread(target=follow)
    thread.start()
    eventually(lambda: len(received) == 2)
    send("three")
    eventually(lambda: len(received) == 3)
    hub.operator().call("POST", f"/v1/runs/{run_id}/stop", None, Ok)
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert [row["text"] for row in received] == ["one", "two", "three"]
    assert received[0]["node_id"] == node.node_id
    others = list(hub.operator().stream_lines(f"/v1/runs/{run_id}/logs?node=nobody"))
    assert others == []
    later = list(hub.operator().stream_lines(f"/v1/runs/{run_id}/logs?after={received[1]['id']}"))
    assert len(later) == 1


def test_events_are_followed_while_they_happen(hub: HubProcess) -> None:
    latest = hub.events()[-1].id
    seen: list[Event] = []

    def follow() -> None:
        for line in hub.operator().stream_lines(f"/v1/events?follow=1&after={latest}"):
            seen.append(msgspec.json.decode(line, type=Event))
            if seen[-1].kind == "node.joined":
                return

    thread = threading.Thread(target=follow)
    thread.start()
    node = hub.join("watched")
    thread.join(timeout=20)
    assert [event.text for event in seen][-1] == f"{node.node_id} joined"
    assert [event.id for event in seen] == list(range(latest + 1, latest + 1 + len(seen)))


def test_the_live_stream_sends_the_state_again_when_something_changes(hub: HubProcess) -> None:
    with raw_connection(hub, hub.join("page", role="viewer")) as stream:
        stream.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = bytearray()

        def states() -> list[bytes]:
            received.extend(stream.recv(1 << 20))
            return [part for part in bytes(received).split(b"\r\n") if part.startswith(b"data: ")]

        eventually(lambda: len(states()) >= 1)
        hub.join("new-on-the-page")
        eventually(lambda: any(b"new-on-the-page joined" in state for state in states()))
    head = bytes(received).split(b"\r\n\r\n")[0]
    assert b"text/event-stream" in head


def test_state_and_hub_info_tell_the_same(hub: HubProcess) -> None:
    state = json.loads(hub.operator().fetch("/api/state"))
    info = hub.operator().call("GET", "/v1/hub", None, HubInfo)
    assert info.url == f"https://127.0.0.1:{hub.port}"
    assert info.disk_free_bytes > 0
    assert [node["node_id"] for node in state["hub"]["nodes"]] == [node.node_id for node in info.nodes]
    assert state["hub"]["boot_id"] == info.boot_id


def test_a_waiting_run_says_what_it_waits_for(hub: HubProcess) -> None:
    run_id = waiting_run(hub)
    assert hub.run(run_id).state == "waiting"
    assert "of 64 needed" in hub.run(run_id).reason
    assert run_id in [run.run_id for run in hub.operator().call("GET", "/v1/runs", None, list[RunInfo])]
    hub.operator().call("POST", f"/v1/runs/{run_id}/stop", None, Ok)


# ---- the bandwidth probe -------------------------------------------------------------------------------------------


def test_the_probe_counts_what_arrives_and_sends_what_is_asked_for(hub: HubProcess) -> None:
    node = hub.join("prober")
    for count in (0, 1, 300_000, 8 << 20):
        assert node.client.send_frame("/v1/node/probe", os.urandom(count), dict) == {"bytes": count}
        assert len(node.client.fetch(f"/v1/node/probe?bytes={count}")) == count
    assert node.client.fetch("/v1/node/probe?bytes=1000") != node.client.fetch("/v1/node/probe?bytes=1000")


@pytest.mark.parametrize("query", ["", "?bytes=-1", "?bytes=x", "?bytes=999999999", "?bytes=1e3", "?bytes=%C2%B2"])
def test_senseless_probes_are_refused(hub: HubProcess, query: str) -> None:
    node = hub.join("silly")
    with pytest.raises(ProtocolError, match="bytes as a whole number"):
        node.client.fetch(f"/v1/node/probe{query}")


# ---- limits and hostile callers ------------------------------------------------------------------------------------


def test_too_large_a_body_is_refused_before_it_is_read_and_the_hub_stays_small(hub: HubProcess) -> None:
    node = hub.join("large")
    memory = psutil.Process(hub.pid).memory_info().rss
    for path in ("/v1/node/heartbeat", "/v1/node/logs", "/v1/node/probe"):
        with pytest.raises(FrameError, match="is not accepted here"):
            node.client.send_frame(path, bytes(40 << 20), Ok)
    assert psutil.Process(hub.pid).memory_info().rss - memory < 30 << 20
    node.beat()


def test_a_chunked_body_without_a_stated_size_is_cut_at_the_limit(hub: HubProcess) -> None:
    with raw_connection(hub, hub.join("chunky")) as stream:
        stream.sendall(b"POST /v1/node/heartbeat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        for _ in range(20):
            stream.sendall(chunk)
        assert stream.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_that_never_ends_is_cut_off(hub: HubProcess) -> None:
    with raw_connection(hub, hub.join("endless")) as stream:
        stream.sendall(b"POST /v1/node/heartbeat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + bytes(0x100000) + b"\r\n"
        with pytest.raises(OSError, match=r"reset|pipe|EOF|violation"):
            stream.sendall(chunk * 500)


def test_endless_headers_are_cut_off(hub: HubProcess) -> None:
    with raw_connection(hub) as stream:
        stream.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with pytest.raises(OSError, match=r"reset|pipe|EOF|violation"):
            stream.sendall(b"x" * (400 * MAX_HEAD_BYTES))


def test_garbage_is_answered_with_400(hub: HubProcess) -> None:
    with raw_connection(hub) as stream:
        stream.sendall(b"\x00\x01\x02 this is not http\r\n\r\n")
        assert stream.recv(4096).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"agent_incarnation": 5}', b'{"nobody": 1}', b"null"]
)
def test_a_malformed_message_is_a_protocol_error(hub: HubProcess, body: bytes) -> None:
    node = hub.join("malformed")
    with pytest.raises(ProtocolError, match="not a valid HeartbeatRequest"):
        node.client.send_frame("/v1/node/heartbeat", body, Ok)


def test_a_node_cannot_say_too_much_about_itself(hub: HubProcess) -> None:
    node = hub.join("chatty")
    request = {"agent_incarnation": "a", "sequence": 1, "known_revision": 0, "facts": {str(i): "x" for i in range(100)}}
    with pytest.raises(ProtocolError, match="too much about itself"):
        node.client.send_frame("/v1/node/heartbeat", json.dumps(request).encode(), Ok)


def test_unknown_paths_and_wrong_methods_are_clear_errors(hub: HubProcess) -> None:
    operator = hub.operator()
    with pytest.raises(NotFoundError, match="GET /v1/nothing"):
        operator.call("GET", "/v1/nothing", None, Ok)
    with pytest.raises(NotFoundError, match="POST /v1/hub"):
        operator.call("POST", "/v1/hub", None, Ok)
    with pytest.raises(NotFoundError, match="no run 'x'"):
        operator.call("GET", "/v1/runs/x", None, Ok)


def test_slow_callers_do_not_hold_up_the_others(hub: HubProcess) -> None:
    slow = [raw_connection(hub) for _ in range(40)]
    try:
        for stream in slow:
            stream.sendall(b"POST /v1/join HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        node = hub.join("quick")
        began = time.monotonic()
        node.beat()
        assert time.monotonic() - began < 3.0
    finally:
        for stream in slow:
            stream.close()


def test_a_stranger_whose_body_dribbles_in_is_cut_off(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home", constants={"ciuic.hub.protocol.REQUEST_S": 4.0}) as hub:
        _dribble(hub)


def _dribble(hub: HubProcess) -> None:
    stream = raw_connection(hub)
    stream.settimeout(0.5)
    stream.sendall(b"POST /v1/join HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
    began = time.monotonic()
    try:
        while time.monotonic() - began < 40.0:
            stream.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                if not stream.recv(1):
                    break
    except OSError:
        pass
    else:
        assert time.monotonic() - began < 40.0, "it could go on for ever"
    finally:
        stream.close()


# ---- the end, and after it -----------------------------------------------------------------------------------------


@pytest.mark.alone
def test_sigterm_ends_the_hub_within_two_seconds_although_answers_are_held(own_hub: HubProcess) -> None:
    nodes = [own_hub.join(place) for place in ("a", "b", "c")]
    for node in nodes:
        node.beat()
    ended: list[object] = []

    def hold(node: NodeOnWire) -> None:
        try:
            ended.append(node.beat(wait_s=2.0, client=node.connect()))
        except UnreachableError as error:
            ended.append(error)

    def follow() -> None:
        try:
            ended.append(list(own_hub.operator().stream_lines("/v1/events?follow=1")))
        except UnreachableError as error:
            ended.append(error)

    threads = [threading.Thread(target=hold, args=(node,)) for node in nodes] + [threading.Thread(target=follow)]
    for thread in threads:
        thread.start()
    eventually(lambda: all(node.sequence == 2 for node in nodes))
    idle = raw_connection(own_hub)
    code, seconds = own_hub.terminate()
    idle.close()
    for thread in threads:
        thread.join(timeout=10)
    assert code == 0
    assert seconds < 2.0
    assert len(ended) == 4
    own_hub.start()
    assert "the hub was stopped" in [event.text for event in own_hub.events()]
    assert own_hub.stderr.read_text() == ""


def test_sigterm_does_not_wait_for_an_upload_that_stands_still(own_hub: HubProcess) -> None:
    with raw_connection(own_hub, own_hub.join("stuck")) as stream:
        stream.sendall(b"POST /v1/node/probe HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nabc")
        eventually(lambda: own_hub.operator().call("GET", "/health", None, dict))
        code, seconds = own_hub.terminate()
    assert code == 0
    assert seconds < 2.0


def test_everything_that_was_answered_survives_kill_9(own_hub: HubProcess) -> None:
    node = own_hub.join("us-west")
    gone = own_hub.join("evil")
    node.beat()
    own_hub.operator().call("POST", f"/v1/nodes/{gone.node_id}/evict", None, Ok)
    run_id = waiting_run(own_hub)
    token = own_hub.token()
    before = own_hub.events()
    own_hub.kill()
    own_hub.start()
    assert {node_id: info.state for node_id, info in own_hub.nodes().items()} == {"us-west": "idle", "evil": "evicted"}
    assert own_hub.run(run_id).state == "waiting"
    assert own_hub.events()[: len(before)] == before
    node.beat()
    with pytest.raises(CertificateError):
        gone.beat()
    own_hub.join("eu-central", token=token)
    assert own_hub.ready_line.split("authority")[1]


def test_kill_9_in_the_middle_of_many_changes_keeps_what_was_answered(own_hub: HubProcess) -> None:
    token = own_hub.token(uses=100)
    answered: list[str] = []

    def join_on() -> None:
        while True:
            try:
                answered.append(own_hub.join("n", token=token).node_id)
            except (UnreachableError, OSError):
                return

    thread = threading.Thread(target=join_on)
    thread.start()
    eventually(lambda: len(answered) >= 5)
    own_hub.kill()
    thread.join(timeout=30)
    own_hub.start()
    assert set(answered) <= set(own_hub.nodes())


def test_the_hub_starts_again_with_other_names_and_nodes_do_not_notice(own_hub: HubProcess) -> None:
    """The server certificate is a new one with every start; nodes pin the authority."""
    node = own_hub.join("us-west")
    node.beat()
    own_hub.terminate()
    own_hub.settings = {"names": ("hub.example", "10.1.2.3")}
    own_hub.start()
    node.beat()
    assert own_hub.ready_line.startswith("hub ready at https://hub.example:")


def test_a_damaged_operator_certificate_is_replaced_at_the_next_start(own_hub: HubProcess) -> None:
    own_hub.terminate()
    (own_hub.home / "operator" / "operator.pem").write_text("nonsense")
    own_hub.start()
    assert own_hub.operator().call("GET", "/v1/hub", None, HubInfo).nodes == []


def test_a_damaged_database_is_a_clear_error_not_a_fresh_start(own_hub: HubProcess) -> None:
    own_hub.terminate()
    for file in (own_hub.home / "hub").glob("ciuic.db*"):
        file.write_bytes(b"nonsense" * 1000)
    with pytest.raises(AssertionError, match="StorageError"):
        own_hub.start()


def test_wal_mode_and_full_synchronisation_are_on(own_hub: HubProcess) -> None:
    with sqlite3.connect(own_hub.home / "hub" / "ciuic.db") as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    raw.close()
    from ciuic.hub.keeping.database import Database

    database = Database(own_hub.home.parent / "other.db")
    assert database._writer.execute("PRAGMA synchronous").fetchone()[0] == 2
    database.close()


def test_the_hub_does_not_load_torch(hub: HubProcess) -> None:
    loaded = {Path(mapped.path).name for mapped in psutil.Process(hub.pid).memory_maps()}
    assert not [name for name in loaded if name.startswith("libtorch")]

"""The client against a real HTTPS server on loopback: what works, and how each failure reads."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from net_server import SmallHub, answer, cut

from ciuic.errors import (
    CertificateError,
    NotFoundError,
    ProtocolError,
    RoleError,
    StorageError,
    UnreachableError,
    UsageError,
)
from ciuic.net.client import HubClient, retrying
from ciuic.net.connection import INTERRUPTED
from ciuic.net.messages import LogRequest, Ok
from ciuic.net.probe import Health, measure

BLOB = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    server = SmallHub(tmp_path / "hub").start()
    yield server
    server.stop()


@pytest.fixture
def client(hub: SmallHub) -> Iterator[HubClient]:
    made = HubClient(hub.url, hub.authority.certificate_pem, *hub.client_files(), timeout_s=5)
    yield made
    made.close()


def _connections(hub: SmallHub) -> int:
    server = hub._server
    return len(server.live) if server else 0


def _bbr_is_available() -> bool:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    return allowed.exists() and "bbr" in allowed.read_text().split()


# ---- messages ----


def test_a_call_carries_the_identity_and_keeps_its_connection(hub: SmallHub, client: HubClient) -> None:
    for _ in range(5):
        assert client.call("POST", "/v1/node/logs", LogRequest(run_id="r", lines=[]), Ok).ok
    assert [identity.name for identity in hub.identities if identity] == ["alice"] * 5
    assert _connections(hub) == 1
    assert client.server_time is not None


def test_the_hubs_error_comes_back_as_the_same_error(client: HubClient) -> None:
    with pytest.raises(NotFoundError, match="there is no /nowhere"):
        client.call("GET", "/nowhere", None, Ok)
    assert client.call("GET", "/health", None, Health).ok


def test_a_caller_without_certificate_is_told_so(hub: SmallHub) -> None:
    anonymous = HubClient(hub.url, hub.authority.certificate_pem)
    with pytest.raises(CertificateError, match="client certificate"):
        anonymous.call("POST", "/v1/node/logs", LogRequest(run_id="r", lines=[]), Ok)
    anonymous.close()


def test_a_reply_of_another_shape_is_a_protocol_error(client: HubClient) -> None:
    with pytest.raises(ProtocolError, match="not a valid LogRequest"):
        client.call("GET", "/health", None, LogRequest)


def test_a_frame_arrives_whole_from_any_kind_of_buffer(hub: SmallHub, client: HubClient) -> None:
    for frame in (BLOB, bytearray(BLOB), memoryview(BLOB), memoryview(BLOB).cast("I")):
        received = client.send_frame("/v1/node/probe", frame, dict)
        assert received == {"bytes": len(BLOB)}


def test_fetch_gives_the_body_or_feeds_the_sink(hub: SmallHub, client: HubClient) -> None:
    hub.files["/blob"] = BLOB
    assert client.fetch("/blob") == BLOB
    pieces: list[bytes] = []
    assert client.fetch("/blob", pieces.append) == b""
    assert b"".join(pieces) == BLOB


def test_nothing_new_is_an_empty_body(hub: SmallHub, client: HubClient) -> None:
    hub.misbehave = lambda handler: bool(answer(handler, b"", status=204) or True)
    assert client.fetch("/v1/runs/r/entries?fragment=0&after=0&wait_s=1") == b""
    hub.misbehave = None
    assert client.call("GET", "/health", None, Health).ok


def test_an_answer_above_the_limit_is_refused_before_it_is_read(hub: SmallHub, client: HubClient) -> None:
    hub.files["/blob"] = BLOB
    with pytest.raises(ProtocolError, match="1048576 bytes"):
        client.fetch("/blob", limit_bytes=1000)
    assert client.call("GET", "/health", None, Health).ok


@pytest.mark.parametrize(
    ("status", "kind"), [(401, CertificateError), (403, RoleError), (404, NotFoundError), (502, UnreachableError)]
)
def test_an_answer_of_something_that_is_no_hub(
    hub: SmallHub, client: HubClient, status: int, kind: type[Exception]
) -> None:
    hub.misbehave = lambda handler: bool(answer(handler, b"<html>hello</html>", status=status) or True)
    with pytest.raises(kind):
        client.call("GET", "/health", None, Health)


def test_a_refusal_in_the_middle_of_a_large_body_is_read(hub: SmallHub, client: HubClient) -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> bool:
        body = b'{"error": {"code": "CIUIC-401", "message": "the push is too large", "cause": "", "next": ""}}'
        answer(handler, body, status=413)
        handler.close_connection = True
        return True

    hub.misbehave = refuse
    with pytest.raises((ProtocolError, UnreachableError)):
        client.send_frame("/v1/runs/r/push", bytes(64 * 1024 * 1024), Ok)


@pytest.mark.skipif(not _bbr_is_available(), reason="this kernel has no bbr")
def test_bbr_is_asked_for(hub: SmallHub, client: HubClient) -> None:
    client.call("GET", "/health", None, Health)
    connection = client._exchange._connection
    assert connection is not None
    assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")
    assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_sink_that_fails_does_not_spoil_the_connection(hub: SmallHub, client: HubClient) -> None:
    def full(piece: bytes) -> None:
        raise MemoryError

    hub.files["/blob"] = BLOB
    with pytest.raises(MemoryError):
        client.fetch("/blob", full)
    assert client.fetch("/blob") == BLOB


@pytest.mark.parametrize("path", ["", "v1/runs", "/v1/runs/my run", "/v1/runs/ü", "/x\r\nHost: y"])
def test_a_path_that_is_no_address_is_a_usage_error(client: HubClient, path: str) -> None:
    with pytest.raises(UsageError):
        client.call("GET", path, None, Ok)
    assert client.call("GET", "/health", None, Health).ok


# ---- dead and bad connections ----


def test_a_keep_alive_connection_that_died_is_replaced_silently(hub: SmallHub, client: HubClient) -> None:
    client.call("GET", "/health", None, Health)
    hub.stop()
    hub.start()
    assert client.call("GET", "/health", None, Health).boot_id == hub.boot_id


def test_a_connection_that_dies_twice_is_an_error(hub: SmallHub, client: HubClient) -> None:
    client.call("GET", "/health", None, Health)
    seen: list[str] = []

    def drop(handler: BaseHTTPRequestHandler) -> bool:
        seen.append(handler.path)
        handler.close_connection = True
        cut(handler.connection)
        return True

    hub.misbehave = drop
    with pytest.raises(UnreachableError):
        client.call("GET", "/health", None, Health)
    assert len(seen) == 2


def test_a_fresh_connection_that_dies_is_not_tried_again(hub: SmallHub, client: HubClient) -> None:
    seen: list[str] = []

    def drop(handler: BaseHTTPRequestHandler) -> bool:
        seen.append(handler.path)
        handler.close_connection = True
        cut(handler.connection)
        return True

    hub.misbehave = drop
    with pytest.raises(UnreachableError):
        client.call("GET", "/health", None, Health)
    assert len(seen) == 1


def test_a_body_cut_short_is_an_error_and_never_a_short_body(hub: SmallHub, client: HubClient) -> None:
    def half(handler: BaseHTTPRequestHandler) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 400)
        handler.close_connection = True
        return True

    hub.misbehave = half
    with pytest.raises(UnreachableError, match="400 of 1000"):
        client.fetch("/blob")


def test_a_refused_connection_says_what_to_start(hub: SmallHub, client: HubClient) -> None:
    hub.stop()
    with pytest.raises(UnreachableError) as caught:
        client.call("GET", "/health", None, Health)
    assert "refused" in caught.value.cause
    assert "ciuic hub start" in caught.value.next


def test_an_unknown_name_is_a_dns_problem(hub: SmallHub) -> None:
    client = HubClient("https://no-such-host.invalid:8443", hub.authority.certificate_pem, timeout_s=5)
    with pytest.raises(UnreachableError, match="cannot be resolved"):
        client.call("GET", "/health", None, Health)


def test_silence_is_a_time_out_that_names_the_silence(hub: SmallHub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        client = HubClient(url, hub.authority.certificate_pem, timeout_s=0.3)
        with pytest.raises(UnreachableError, match="300 ms"):
            client.call("GET", "/health", None, Health)


def test_a_slow_answer_that_keeps_moving_is_no_time_out(hub: SmallHub) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n")
        for _ in range(8):
            release.wait(0.15)
            handler.wfile.write(b"x")
        return True

    release = threading.Event()
    hub.misbehave = drip
    client = HubClient(hub.url, hub.authority.certificate_pem, *hub.client_files(), timeout_s=0.8)
    assert client.fetch("/blob") == b"x" * 8
    client.close()


def test_a_port_without_tls_is_named(hub: SmallHub) -> None:
    def hello(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as plain:
        thread = threading.Thread(target=hello, args=(plain,))
        thread.start()
        client = HubClient(f"https://127.0.0.1:{plain.getsockname()[1]}", hub.authority.certificate_pem, timeout_s=5)
        with pytest.raises(UnreachableError, match="does not speak TLS"):
            client.call("GET", "/health", None, Health)
        thread.join()


def test_a_hub_of_another_authority_is_refused(hub: SmallHub, tmp_path: Path) -> None:
    other = SmallHub(tmp_path / "other")
    client = HubClient(hub.url, other.authority.certificate_pem)
    with pytest.raises(CertificateError, match="no certificate of this network"):
        client.call("GET", "/health", None, Health)


def test_a_name_that_the_certificate_does_not_cover_is_refused(hub: SmallHub) -> None:
    client = HubClient(f"https://127.0.0.2:{hub.port}", hub.authority.certificate_pem)
    hub.stop()
    hub.start("127.0.0.2")
    with pytest.raises(CertificateError, match="does not cover"):
        client.call("GET", "/health", None, Health)


def test_a_node_cannot_play_the_hub_with_its_own_certificate(hub: SmallHub) -> None:
    hub.stop()
    hub.use_certificate(*hub.authority.issue_client(None, common_name="127.0.0.1", role="node"))
    hub.start()
    client = HubClient(hub.url, hub.authority.certificate_pem)
    with pytest.raises(CertificateError):
        client.call("GET", "/health", None, Health)


def test_a_certificate_of_another_network_is_no_identity(hub: SmallHub, tmp_path: Path) -> None:
    other = SmallHub(tmp_path / "other")
    client = HubClient(hub.url, hub.authority.certificate_pem, *other.client_files())
    with pytest.raises((CertificateError, UnreachableError)):
        client.call("POST", "/v1/node/logs", LogRequest(run_id="r", lines=[]), Ok)
    assert hub.lines == []


def test_a_bad_address_is_a_usage_error(hub: SmallHub) -> None:
    with pytest.raises(UsageError):
        HubClient("http://hub", hub.authority.certificate_pem)


def test_a_long_poll_can_be_ended_from_another_thread(hub: SmallHub, client: HubClient) -> None:
    waiting, release = threading.Event(), threading.Event()

    def hold(handler: BaseHTTPRequestHandler) -> bool:
        waiting.set()
        release.wait(20)
        return True

    hub.misbehave = hold
    threading.Thread(target=lambda: waiting.wait(20) and client.interrupt()).start()
    with pytest.raises(UnreachableError):
        client.fetch("/wait", timeout_s=20)
    release.set()


def test_a_long_poll_on_a_kept_alive_connection_is_not_sent_again_when_it_is_ended(
    hub: SmallHub, client: HubClient
) -> None:
    client.call("POST", "/v1/node/logs", LogRequest(run_id="r", lines=[]), Ok)
    waiting, release = threading.Semaphore(0), threading.Event()

    def hold(handler: BaseHTTPRequestHandler) -> bool:
        waiting.release()
        release.wait(20)
        return True

    hub.misbehave = hold
    threading.Thread(target=lambda: waiting.acquire(timeout=20) and client.interrupt()).start()
    with pytest.raises(UnreachableError) as refused:
        client.fetch("/wait", timeout_s=20)
    assert refused.value.cause == INTERRUPTED
    assert not waiting.acquire(blocking=False)
    release.set()


# ---- downloads ----


def _cut_after(hub: SmallHub, count: int, times: int) -> list[str]:
    """Make the server cut `times` answers after `count` bytes; the Range headers seen."""
    ranges: list[str] = []

    def misbehave(handler: BaseHTTPRequestHandler) -> bool:
        wanted = handler.headers.get("Range", "")
        ranges.append(wanted)
        if len(ranges) > times:
            return False
        content = hub.files[handler.path]
        start = int(wanted.removeprefix("bytes=").removesuffix("-") or "0")
        head = f"HTTP/1.1 {206 if wanted else 200} X\r\nContent-Length: {len(content) - start}\r\n"
        if wanted:
            head += f"Content-Range: bytes {start}-{len(content) - 1}/{len(content)}\r\n"
        handler.wfile.write(head.encode() + b"\r\n" + content[start : start + count])
        handler.close_connection = True
        cut(handler.connection)
        return True

    hub.misbehave = misbehave
    return ranges


def test_a_download_goes_on_where_it_was_cut(hub: SmallHub, client: HubClient, tmp_path: Path) -> None:
    hub.files["/blob"] = BLOB
    ranges = _cut_after(hub, 300_000, times=3)
    client.download("/blob", tmp_path / "base", len(BLOB))
    assert (tmp_path / "base").read_bytes() == BLOB
    assert ranges == ["", "bytes=300000-", "bytes=600000-", "bytes=900000-"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "hub"]


def test_a_download_goes_on_from_what_an_earlier_process_left(hub: SmallHub, client: HubClient, tmp_path: Path) -> None:
    hub.files["/blob"] = BLOB
    (tmp_path / "base.part").write_bytes(BLOB[:1_000_000])
    ranges = _cut_after(hub, 0, times=0)
    client.download("/blob", tmp_path / "base", len(BLOB))
    assert (tmp_path / "base").read_bytes() == BLOB
    assert ranges == ["bytes=1000000-"]


def test_a_part_that_is_too_long_is_not_trusted(hub: SmallHub, client: HubClient, tmp_path: Path) -> None:
    hub.files["/blob"] = BLOB
    (tmp_path / "base.part").write_bytes(b"z" * (len(BLOB) + 1))
    client.download("/blob", tmp_path / "base", len(BLOB))
    assert (tmp_path / "base").read_bytes() == BLOB


def test_a_server_that_ignores_ranges_is_read_from_the_start(hub: SmallHub, client: HubClient, tmp_path: Path) -> None:
    hub.misbehave = lambda handler: bool(answer(handler, BLOB) or True)
    (tmp_path / "base.part").write_bytes(b"z" * 1000)
    client.download("/blob", tmp_path / "base", len(BLOB))
    assert (tmp_path / "base").read_bytes() == BLOB


def test_a_download_without_progress_ends(hub: SmallHub, client: HubClient, tmp_path: Path) -> None:
    hub.files["/blob"] = BLOB
    ranges = _cut_after(hub, 0, times=1000)
    with pytest.raises(UnreachableError):
        client.download("/blob", tmp_path / "base", len(BLOB))
    assert 1 < len(ranges) < 20
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("announced", [len(BLOB) - 1, len(BLOB) + 1, 0])
def test_a_download_of_another_size_than_announced_is_refused(
    hub: SmallHub, client: HubClient, tmp_path: Path, announced: int
) -> None:
    hub.files["/blob"] = BLOB
    with pytest.raises(ProtocolError):
        client.download("/blob", tmp_path / "base", announced)
    assert not (tmp_path / "base").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_storage_error(hub: SmallHub, client: HubClient, tmp_path: Path) -> None:
    hub.files["/blob"] = BLOB
    (tmp_path / "base.part").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"base\.part"):
        client.download("/blob", tmp_path / "base", len(BLOB))
    assert client.call("GET", "/health", None, Health).ok


# ---- streams ----


def test_lines_arrive_one_by_one_while_the_stream_is_open(hub: SmallHub, client: HubClient) -> None:
    first_seen = threading.Event()

    def stream(handler: BaseHTTPRequestHandler) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (b'{"id":1}\n', b"\n", b'{"id"', b":2}\n"):
            handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            if part.endswith(b"1}\n"):
                first_seen.wait(20)
        handler.wfile.write(b"0\r\n\r\n")
        return True

    hub.misbehave = stream
    lines = client.stream_lines("/v1/events?follow=1")
    assert next(lines) == b'{"id":1}'
    first_seen.set()
    assert list(lines) == [b'{"id":2}']
    hub.misbehave = None
    assert client.call("GET", "/health", None, Health).ok


def test_leaving_a_stream_closes_its_connection(hub: SmallHub, client: HubClient) -> None:
    hub.misbehave = lambda handler: bool(
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\na\n\r\n")
    )
    lines = client.stream_lines("/v1/events?follow=1")
    assert next(lines) == b"a"
    lines.close()
    hub.misbehave = None
    assert client.call("GET", "/health", None, Health).ok


def test_a_stream_that_falls_silent_is_unreachable(hub: SmallHub, client: HubClient) -> None:
    hold = threading.Event()

    def stream(handler: BaseHTTPRequestHandler) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\na\n\r\n")
        hold.wait(20)
        return True

    hub.misbehave = stream
    lines = client.stream_lines("/v1/events?follow=1", silence_s=0.3)
    assert next(lines) == b"a"
    with pytest.raises(UnreachableError):
        next(lines)
    hold.set()


# ---- retrying and probing ----


def test_retrying_outlasts_an_outage_and_says_so_once(
    hub: SmallHub, client: HubClient, caplog: pytest.LogCaptureFixture
) -> None:
    hub.stop()
    attempts: list[int] = []

    def call() -> Health:
        attempts.append(1)
        if len(attempts) == 3:
            hub.start()
        return client.call("GET", "/health", None, Health)

    assert retrying(call, stop=threading.Event(), what="test").ok
    assert len(attempts) == 3
    said = [record.getMessage() for record in caplog.records if record.name == "ciuic.net.client"]
    assert len(said) == 2
    assert "trying again" in said[0]
    assert "is back" in said[1]


def test_retrying_ends_with_the_last_error_when_told_to_stop(hub: SmallHub, client: HubClient) -> None:
    hub.stop()
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnreachableError):
        retrying(lambda: client.call("GET", "/health", None, Health), stop=stop, what="test")


def test_other_errors_are_not_retried(client: HubClient) -> None:
    with pytest.raises(NotFoundError):
        retrying(lambda: client.call("GET", "/nowhere", None, Ok), stop=threading.Event(), what="test")


def test_the_probe_measures_the_link_and_the_machine(hub: SmallHub, client: HubClient, tmp_path: Path) -> None:
    measured = measure(client, tmp_path)
    assert 0 < measured["rtt_s"] < 1
    assert measured["up_bits_per_s"] > 1e6
    assert measured["down_bits_per_s"] > 1e6
    assert abs(measured["clock_offset_s"]) < 1.5
    assert {"cpu_count", "memory_free_bytes", "disk_free_bytes", "gpu_count"} <= set(measured)

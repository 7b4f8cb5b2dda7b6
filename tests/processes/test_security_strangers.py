"""Whoever has no certificate: 401 everywhere but where one joins, and it costs the hub nothing. Real hub, real TLS."""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hub_process import HubProcess, eventually
from security_world import ask, dial, endpoints_of, files_of, hub_endpoints, until_closed

from ciuic.errors import CertificateError, OverloadedError, UnreachableError
from ciuic.hub.access.limits import LimitSettings
from ciuic.hub.api.node import PUBLIC
from ciuic.net.messages import Ok

ANNOUNCED = "Content-Length: 10000000"
"""A body that is announced and never sent: an answer shows that nobody waited for it."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    limits = {"stranger_requests_per_s": 1000.0, "stranger_requests_burst": 5000.0}
    with HubProcess(tmp_path_factory.mktemp("strangers") / "home", limits=limits) as running:
        yield running


def test_without_a_certificate_every_endpoint_there_is_answers_401_at_once(hub: HubProcess, tmp_path: Path) -> None:
    endpoints = hub_endpoints(tmp_path / "other")
    assert len(endpoints) > 45
    assert ("POST", "/v1/runs/some-1/push") in endpoints
    assert {path for _, path in endpoints} >= PUBLIC
    before, answers = files_of(hub.home), {}
    for method, path in endpoints:
        if path in PUBLIC:
            continue
        with dial(hub) as stream:
            answers[method, path] = ask(stream, method, path, ANNOUNCED)
    assert {key: status for key, (status, _) in answers.items() if status != 401} == {}
    for (method, _), (_, body) in answers.items():
        if method != "HEAD":
            error = json.loads(body)["error"]
            assert error["code"] == "CIUIC-202"
            assert "ciuic node join" in error["next"]
    assert files_of(hub.home) == before, "a stranger cost the disk something"


def test_a_shard_answers_401_at_every_endpoint(tmp_path: Path) -> None:
    from ciuic.hub.api.events import Board
    from ciuic.hub.shards.api import ShardDesk, ShardNodeApi
    from ciuic.hub.shards.host import ShardHost, Ties

    ties = Ties(clock=time.monotonic, run_of=lambda run: None, fetch=lambda *_: None, wake=lambda _: None)  # type: ignore[arg-type]
    host = ShardHost("s1", tmp_path / "runs", ties)
    desk = ShardDesk(host=host, link=None, board=Board())  # type: ignore[arg-type]
    routes = ShardNodeApi(desk).routes()
    assert len(endpoints_of(routes)) >= 6
    assert all(status == 401 for status in answered_without_certificate(desk, routes))


def answered_without_certificate(desk: object, routes: list) -> list[int]:  # type: ignore[type-arg]
    """The gate of a shard is the hub's own: asked here without a socket."""
    import asyncio

    from starlette.applications import Starlette

    from ciuic.hub.access.limits import Limits
    from ciuic.hub.api.endpoints import Gate

    async def all_of_them() -> list[int]:
        gate, found = Gate(Starlette(routes=routes), frozenset(), desk, Limits()), []  # type: ignore[arg-type]

        async def receive() -> dict[str, object]:
            raise AssertionError("the body of a stranger was read")

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                found.append(message["status"])

        for method, path in endpoints_of(routes):
            scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
            await gate(scope, receive, send)  # type: ignore[arg-type]
        return found  # type: ignore[return-value]

    return asyncio.run(all_of_them())


def test_anonymous_push_pull_and_kill_are_refused(hub: HubProcess) -> None:
    for path in ("/v1/runs/any/push", "/v1/runs/any/chunks", "/v1/runs/any/stop", "/v1/nodes/any/evict"):
        with pytest.raises(CertificateError):
            hub.nobody().send_frame(path, b"x" * 100_000, Ok)
    for path in ("/v1/runs/any/entries?fragment=0&after=0", "/v1/runs/any/snapshot?fragment=0&version=0", "/metrics"):
        with pytest.raises(CertificateError):
            hub.nobody().fetch(path)


def test_a_thousand_refused_requests_cost_the_hub_no_memory_and_no_disk(hub: HubProcess) -> None:
    process = psutil.Process(hub.pid)

    def burst(count: int) -> None:
        with dial(hub) as stream:
            for _ in range(count):
                assert ask(stream, "GET", "/v1/runs/any/entries")[0] == 401

    burst(200)  # whatever is allocated once
    before, files = process.memory_info().rss, files_of(hub.home)
    burst(1000)
    assert process.memory_info().rss - before < 4 << 20
    assert files_of(hub.home) == files


def test_a_stranger_who_sends_a_body_all_the_same_is_cut_off(hub: HubProcess) -> None:
    memory = psutil.Process(hub.pid).memory_info().rss
    with dial(hub) as stream:
        stream.sendall(b"POST /v1/runs/any/push HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        with pytest.raises(OSError, match=r"reset|pipe|EOF|violation"):
            stream.sendall(bytes(500 << 20))
    assert psutil.Process(hub.pid).memory_info().rss - memory < 16 << 20


def test_a_connection_that_says_nothing_is_ended(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home", constants={"ciuic.hub.protocol.REQUEST_S": 4.0}) as hub, dial(hub) as stream:
        assert until_closed(stream, within_s=60.0) < 60.0


# ---- limits --------------------------------------------------------------------------------------------------------


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[HubProcess]:
    limits = {
        "stranger_requests_per_s": 5.0,
        "stranger_requests_burst": 40.0,
        "stranger_connections": 8,
        "requests_per_s": 10.0,
        "requests_burst": 100.0,
        "connections": 16,
    }
    with HubProcess(tmp_path / "home", limits=limits) as running:
        yield running


def test_a_stranger_who_asks_too_often_gets_429_and_nodes_of_the_same_address_go_on(strict: HubProcess) -> None:
    node = strict.join("us-west")
    node.beat()
    with dial(strict) as stream:
        seen = [ask(stream, "GET", "/health") for _ in range(60)]
    assert 429 in [status for status, _ in seen]
    refused = next(body for status, body in seen if status == 429)
    assert json.loads(refused)["error"]["code"] == "CIUIC-301"
    for _ in range(20):
        node.beat()


def test_a_node_that_asks_too_often_is_told_to_wait_and_loses_nothing(strict: HubProcess) -> None:
    node = strict.join("eager")
    other = strict.join("calm")
    with dial(strict, node) as stream:
        statuses = [ask(stream, "GET", "/v1/node/probe?bytes=1")[0] for _ in range(150)]
    assert statuses.count(200) >= 100
    assert 429 in statuses
    with pytest.raises(OverloadedError, match="asks too often"):
        [node.beat() for _ in range(300)]
    other.beat()
    eventually(lambda: _beats(node))


def _beats(node) -> bool:  # type: ignore[no-untyped-def]
    try:
        return bool(node.beat().boot_id)
    except UnreachableError:  # as an agent does: it tries again
        return False


def test_connections_beyond_the_limit_are_not_taken_and_the_others_stay(strict: HubProcess) -> None:
    node = strict.join("many")
    streams: list[ssl.SSLSocket] = []
    refused = 0
    for _ in range(24):
        stream = dial(strict, node)
        try:
            if ask(stream, "GET", "/v1/node/probe?bytes=1")[0] == 200:
                streams.append(stream)
                continue
        except OSError:
            refused += 1
        stream.close()
    assert 8 <= len(streams) <= 16
    assert refused >= 8
    assert ask(streams[0], "GET", "/v1/node/probe?bytes=1")[0] == 200
    for stream in streams:
        stream.close()

    def is_served() -> bool:
        with dial(strict, node) as stream:
            return ask(stream, "GET", "/v1/node/probe?bytes=1")[0] == 200

    eventually(is_served)


def test_slow_loris_and_unfinished_handshakes_do_not_keep_others_out(strict: HubProcess) -> None:
    import socket

    node = strict.join("steady")
    silent = [socket.create_connection(("127.0.0.1", strict.port)) for _ in range(200)]
    slow = []
    for _ in range(8):
        stream = dial(strict)
        stream.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        slow.append(stream)
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.2):
            for one in slow:
                try:
                    one.sendall(b"x")
                except OSError:
                    continue

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        for _ in range(5):
            node.beat(client=node.connect())
        assert max(until_closed(one, within_s=60.0) for one in slow) < 60.0, "headers may dribble for ever"
    finally:
        stop.set()
        dripping.join()
        for one in [*silent, *slow]:
            one.close()
    node.beat()


def test_the_defaults_carry_the_training_of_many_nodes_behind_one_address() -> None:
    """64 nodes with 32 fragments each, one long poll per fragment, 16 streams per transfer, a beat a second each."""
    given = LimitSettings()
    assert given.connections >= 32 + 16 + 16
    assert given.total_connections >= 64 * (32 + 16 + 16)
    assert given.requests_per_s >= 32 * 4 + 10
    assert given.stranger_requests_burst >= 64 * 3, "all of them join at once"

"""Bytes per core-second through the hub, beside a bare TLS server in Python that moves the same bytes.

A real hub process on loopback; nodes without a model push updates of a transformer's size round after round and take
the entries. Counted is the processor time of the serving process alone (psutil), over the same rounds.
"""

import argparse
import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ciuic.bench import Table
from ciuic.bench.hub_bare import BUFFER_BYTES, ORDER, receive
from ciuic.bench.hub_load import LoadNode, transformer_layout
from ciuic.bench.work import work_folder
from ciuic.errors import RunFailedError, UnreachableError
from ciuic.lab.crew import Crew
from ciuic.lab.stage import operator_client
from ciuic.ledger.layout import Layout
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.net.tls import client_context

CODECS = ("1-bit", "int8")
HUB_START_S = 60.0
WARM_ROUNDS = 2
BARE_BYTES = 1_000_000_000
"""Processor time is counted in steps of 10 ms: this takes about half a second."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its own options."""
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20, help="that are counted, per codec")
    parser.add_argument("--elements", type=float, default=6e6, help="of the model")
    parser.add_argument("--quick", action="store_true", help="2 nodes, 5 rounds")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both servers, both codecs. Raises RunFailedError when a server does not come up or refuses a push."""
    nodes, rounds = (2, 5) if options.quick else (options.nodes, options.rounds)
    layout = transformer_layout(int(options.elements))
    found: dict[str, Any] = {"nodes": nodes, "rounds": rounds, "elements": layout.fragment_shape(0).element_count}
    with work_folder(options.folder / "hub.work") as folder, Crew(folder / "logs", owner="benchmark") as crew:
        home = folder / "hub"
        client, hub = _start_hub(crew, home)
        token = client.call("POST", "/v1/tokens", m.CreateTokenRequest(uses=nodes), m.CreateTokenReply).token
        members = [LoadNode(client.address.url, token, folder, name=f"n{i}") for i in range(nodes)]
        subject = _Subject(client=client, members=members, process=hub, home=home)
        try:
            for codec in CODECS:
                found[codec] = _measure_codec(subject, layout, codec, rounds)
        finally:
            for member in members:
                member.close()
            client.close()
    return found | _headline(found)


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """The hub that is measured."""

    client: HubClient
    """Of its operator."""
    members: list[LoadNode]
    process: psutil.Process
    home: Path


def _measure_codec(subject: _Subject, layout: Layout, codec: str, rounds: int) -> dict[str, Any]:
    client, members = subject.client, subject.members
    job = {
        "name": f"load-{codec}",
        "nodes": {"min": len(members)},
        "sync": {"interval": 8, "compression": codec},
        "train": {"samples": 10**9},
    }
    run_id = client.call("POST", "/v1/runs", m.SubmitRequest(job=job), m.SubmitReply).run_id
    _together([lambda n=n, i=i: n.attach(run_id, layout, codec, seed=i) for i, n in enumerate(members)])
    _together([lambda n=n: _repeat(n.round, WARM_ROUNDS) for n in members])
    before = _moved(members)
    cpu_s, wall_s = _cost(subject.process, lambda: _together([lambda n=n: _repeat(n.round, rounds) for n in members]))
    into, out = (after - earlier for after, earlier in zip(_moved(members), before, strict=True))
    client.call("POST", f"/v1/runs/{run_id}/stop", None, m.Ok)
    exchange = (into // (rounds * len(members)), out // (rounds * len(members)))
    bare_bytes_per_core_s = _bare(subject.home, exchange, nodes=len(members))
    hub_bytes_per_core_s = (into + out) / cpu_s
    return {
        "in_bytes": into,
        "out_bytes": out,
        "hub_cpu_s": round(cpu_s, 3),
        "hub_wall_s": round(wall_s, 3),
        "hub_bytes_per_core_s": round(hub_bytes_per_core_s),
        "bare_tls_bytes_per_core_s": round(bare_bytes_per_core_s),
        "hub_cpu_ms_per_push": round(1000 * cpu_s / (rounds * len(members)), 2),
        "over_bare_tls": round(hub_bytes_per_core_s / bare_bytes_per_core_s, 4),
    }


def _headline(found: dict[str, Any]) -> dict[str, Any]:
    first = found[CODECS[0]]
    headline = {"hub_bytes_per_core_s_over_bare_tls": first["over_bare_tls"]}
    for codec in CODECS:
        headline[f"hub_bytes_per_core_s_over_bare_tls_{codec.replace('-', '')}"] = found[codec]["over_bare_tls"]
    return headline


def _start_hub(crew: Crew, home: Path) -> tuple[HubClient, psutil.Process]:
    hand = crew.start("hub", ["hub", "start", "--home", str(home), "--host", "127.0.0.1", "--port", "0"], {})
    deadline = time.monotonic() + HUB_START_S
    while time.monotonic() < deadline:
        crew.check()
        with contextlib.suppress(FileNotFoundError, UnreachableError):  # not there yet
            client = operator_client(home)
            client.call("GET", "/v1/nodes", None, list[m.NodeInfo])
            return client, psutil.Process(hand.guard_pid).children()[0]
        time.sleep(0.1)
    raise RunFailedError("the benchmark's hub does not answer", next=f"read {hand.log}")


@contextlib.contextmanager
def _bare_server(home: Path) -> Generator[tuple[psutil.Process, int]]:
    files = home / "hub"
    command = [sys.executable, "-m", "ciuic.bench.hub_bare", "--authority", str(home / "operator" / "authority.pem")]
    command += ["--cert", str(files / "hub.pem"), "--key", str(files / "hub.key")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise RunFailedError("the bare TLS server did not start")
        yield psutil.Process(process.pid), int(line)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _bare(home: Path, exchange: tuple[int, int], *, nodes: int) -> float:
    """Bytes per core-second of moving `exchange` = (bytes in, bytes out) again and again."""
    rounds = 1 + BARE_BYTES // (sum(exchange) * nodes)
    authority = (home / "operator" / "authority.pem").read_bytes()
    context = client_context(
        authority, home / "operator" / "operator.pem", home / "operator" / "operator.key", "updates"
    )
    with _bare_server(home) as (server, port), contextlib.ExitStack() as stack:
        connections = []
        for _ in range(nodes):
            plain = socket.create_connection(("127.0.0.1", port))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections.append(stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1")))
        payload = bytes(exchange[0])

        def work(connection: ssl.SSLSocket, times: int) -> None:
            buffer = memoryview(bytearray(BUFFER_BYTES))
            for _ in range(times):
                connection.sendall(ORDER.pack(*exchange))
                connection.sendall(payload)
                receive(connection, exchange[1], buffer)

        _together([lambda c=c: work(c, WARM_ROUNDS) for c in connections])
        cpu_s, _ = _cost(server, lambda: _together([lambda c=c: work(c, rounds) for c in connections]))
        return sum(exchange) * nodes * rounds / cpu_s


def _cost(process: psutil.Process, work: Callable[[], None]) -> tuple[float, float]:
    """(processor seconds of `process`, wall seconds) while `work` runs here."""
    began, before = time.monotonic(), process.cpu_times()
    work()
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system, time.monotonic() - began


def _repeat(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


def _moved(members: list[LoadNode]) -> tuple[int, int]:
    return sum(n.sent_bytes for n in members), sum(n.received_bytes for n in members)


def _together(calls: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own; raises the first error."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def tables(result: dict[str, Any]) -> list[Table]:
    """One row per codec."""
    rows: list[tuple[str, ...]] = [
        (
            codec,
            f"{(found['in_bytes'] + found['out_bytes']) / 1e6:.1f}",
            f"{found['hub_bytes_per_core_s'] / 1e6:.0f}",
            f"{found['bare_tls_bytes_per_core_s'] / 1e6:.0f}",
            f"{found['over_bare_tls']:.3f}",
            f"{found['hub_cpu_ms_per_push']:.1f}",
        )
        for codec, found in ((codec, result[codec]) for codec in CODECS)
    ]
    return [
        Table(
            title=f"{result['nodes']} nodes, {result['rounds']} rounds, {result['elements'] / 1e6:.1f} M elements",
            columns=("codec", "MB moved", "hub MB/core-s", "bare TLS MB/core-s", "ratio", "hub CPU ms/push"),
            rows=rows,
            note="the hub also checks, stores (fsync), aggregates, encodes and appends what it moves",
        )
    ]

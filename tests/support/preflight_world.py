"""Nodes of a preflight as forked processes: the whole of it but the command line, on loopback."""

import os
import socket
import sys
import time
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from rendezvous_world import Process, Talk

from ciuic.doctor.preflight import dialing
from ciuic.doctor.preflight.local import look_here
from ciuic.doctor.preflight.records import Check, Errand, Report, Settings
from ciuic.doctor.preflight_probe.__main__ import run

CLEAN = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF", "NCCL_ALGO": ""}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def at(port: int, rank: int, *, nnodes: int = 2, wait_s: float = 30.0, count: str = "") -> Settings:
    return Settings(nnodes=nnodes, node_rank=rank, host="127.0.0.1", port=port, wait_s=wait_s, count=count)


def start(settings: Settings, before: Callable[[], None] = lambda: None, **environment: str) -> Process:
    """One node; `before` runs in its process first."""

    def body(pipe: Connection) -> None:
        before()
        facts = look_here(settings, os.environ, Path.cwd())
        Talk(pipe).say(msgspec.json.encode(run(Errand(settings=settings, facts=facts))))

    return Process(body, CLEAN | environment)


def report_of(process: Process) -> Report:
    found = msgspec.json.decode(process.hear(), type=Report)
    process.end()
    return found


def both(first: Process, second: Process) -> Report:
    """The one report that both nodes give."""
    here, there = report_of(first), report_of(second)
    assert here == there
    return here


def of(report: Report, name: str, rank: int | None = None) -> Check:
    """The line of that name and rank."""
    (check,) = [check for check in report.checks if check.name == name and check.rank == rank]
    return check


def failing(report: Report) -> set[str]:
    return {check.name for check in report.checks if check.result == "fail"}


def pretend_installed(folder: Path, package: str, version: str) -> Callable[[], None]:
    """Metadata of another version of a package, first on the path."""
    place = folder / f"{package}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return lambda: sys.path.insert(0, str(folder))


def wrong_clock(offset_s: float) -> Callable[[], None]:
    """The preflight of this process sees a clock that is ahead."""

    def shift() -> None:
        names = {name: getattr(time, name) for name in ("perf_counter", "monotonic", "sleep")}
        shifted = types.SimpleNamespace(time_ns=lambda: time.time_ns() + round(offset_s * 1e9), **names)
        dialing.time = shifted  # ty: ignore[invalid-assignment]

    return shift

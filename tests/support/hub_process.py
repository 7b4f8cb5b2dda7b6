"""A real hub in a process of its own, and nodes that speak to it over real TLS."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
from warm import Started, warm_popen

from ciuic.errors import CiuicError
from ciuic.net.client import HubClient, join_network
from ciuic.net.messages import (
    CreateTokenReply,
    CreateTokenRequest,
    Event,
    HeartbeatReply,
    HeartbeatRequest,
    NodeInfo,
    Role,
    RunInfo,
    SubmitReply,
    SubmitRequest,
    WorkerReport,
)

T = TypeVar("T")

PROGRAM = """
import importlib
import sys
from pathlib import Path
from ciuic.hub.config import HubConfig
from ciuic.hub.server import serve
from ciuic.hub.access.limits import LimitSettings
home, port, settings = Path(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3], {})
if "limits" in settings:
    settings["limits"] = LimitSettings(**settings["limits"])
for place, value in settings.pop("constants", {}).items():
    setattr(importlib.import_module(place.rpartition(".")[0]), place.rpartition(".")[2], value)
sys.exit(serve(HubConfig(home=home, host="127.0.0.1", port=port, **settings)))
"""
READY_S = 60.0


def eventually(what: Callable[[], T | None], *, within_s: float = 20.0, every_s: float = 0.05) -> T:
    """The first true value of `what`; fails when none comes in time."""
    until = time.monotonic() + within_s
    while True:
        value = what()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"still {value!r} after {within_s} s")
        time.sleep(every_s)


class HubProcess:
    """Start, kill, stop, restart: always in the same folder and, after the first start, on the same port."""

    def __init__(self, home: Path, **settings: object) -> None:
        """`settings`: of HubConfig; `constants`: "ciuic.module.NAME" and its value, for whoever cannot wait."""
        self.home = home
        self.port = 0
        self.settings = settings
        self.lines: queue.Queue[str] = queue.Queue()
        self.ready_line = ""
        self.process: Started | None = None
        self.stderr = home.parent / f"{home.name}.stderr"
        self.clients: list[HubClient] = []

    def __enter__(self) -> "HubProcess":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for client in self.clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def start(self) -> None:
        command = [sys.executable, "-c", PROGRAM, str(self.home), str(self.port), repr(self.settings)]
        with self.stderr.open("a") as stderr:
            self.process = warm_popen(command, stdout=subprocess.PIPE, stderr=stderr, env=dict(os.environ))
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        try:
            self.ready_line = self.lines.get(timeout=READY_S)
        except queue.Empty:
            raise AssertionError(f"the hub is not ready: {self.stderr.read_text()}") from None
        if not self.ready_line.startswith("hub ready at "):
            self.process.wait(timeout=30)
            raise AssertionError(f"the hub did not start: {self.ready_line!r} {self.stderr.read_text()}")
        self.port = int(self.url.rsplit(":", 1)[1])

    def _read(self, process: Started) -> None:
        if process.stdout is not None:
            with process.stdout:
                for line in process.stdout:
                    self.lines.put(line.rstrip("\n"))
        self.lines.put("")

    @property
    def url(self) -> str:
        return (self.home / "hub" / "address").read_text().strip()

    @property
    def pid(self) -> int:
        if self.process is None:
            raise AssertionError("the hub was not started")
        return self.process.pid

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def terminate(self) -> tuple[int, float]:
        """SIGTERM; returns exit code and seconds."""
        began = time.monotonic()
        return self._end(signal.SIGTERM), time.monotonic() - began

    def _end(self, number: int) -> int:
        if self.process is None:
            raise AssertionError("the hub was not started")
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        code = self.process.wait(timeout=30)
        while self.lines.get(timeout=10):  # until the reader has seen the end
            pass
        return code

    # ---- who speaks to it ----

    def operator(self, *, timeout_s: float = 30.0) -> HubClient:
        folder = self.home / "operator"
        authority = (folder / "authority.pem").read_bytes()
        client = HubClient(
            self.url, authority, folder / "operator.pem", folder / "operator.key", "operator", timeout_s=timeout_s
        )
        self.clients.append(client)
        return client

    def nobody(self) -> HubClient:
        """A caller without a certificate."""
        client = HubClient(self.url, (self.home / "operator" / "authority.pem").read_bytes(), None, None, "control")
        self.clients.append(client)
        return client

    def token(self, *, uses: int = 1, lifetime_s: float = 600.0, role: Role = "node") -> str:
        request = CreateTokenRequest(uses=uses, lifetime_s=lifetime_s, role=role)
        return self.operator().call("POST", "/v1/tokens", request, CreateTokenReply).token

    def join(self, location: str, *, token: str = "", role: Role = "node") -> "NodeOnWire":
        made = join_network(token or self.token(role=role), location, {"gpus": 8.0}, url=self.url)
        folder = self.home.parent / f"node-{made[0]}-{len(self.clients)}"
        folder.mkdir()
        (folder / "node.key").write_bytes(made[1])
        (folder / "node.pem").write_bytes(made[2])
        return NodeOnWire(self, made[0], folder, location)

    def submit(self, job: dict[str, object], submit_token: str = "") -> str:
        request = SubmitRequest(job=job, submit_token=submit_token)
        return self.operator().call("POST", "/v1/runs", request, SubmitReply).run_id

    def nodes(self) -> dict[str, NodeInfo]:
        return {node.node_id: node for node in self.operator().call("GET", "/v1/nodes", None, list[NodeInfo])}

    def run(self, run_id: str) -> RunInfo:
        return self.operator().call("GET", f"/v1/runs/{run_id}", None, RunInfo)

    def events(self, after: int = 0) -> list[Event]:
        lines = self.operator().stream_lines(f"/v1/events?after={after}")
        return [msgspec.json.decode(line, type=Event) for line in lines]


class NodeOnWire:
    """A joined node: its certificate, and heartbeats by hand."""

    def __init__(self, hub: HubProcess, node_id: str, folder: Path, location: str) -> None:
        self.hub = hub
        self.node_id = node_id
        self.folder = folder
        self.location = location
        self.sequence = 0
        self.revision = 0
        self.client = self.connect()

    def connect(self) -> HubClient:
        authority = (self.hub.home / "operator" / "authority.pem").read_bytes()
        client = HubClient(self.hub.url, authority, self.folder / "node.pem", self.folder / "node.key", "control")
        self.hub.clients.append(client)
        return client

    def beat(
        self,
        *,
        wait_s: float = 0.0,
        incarnation: str = "agent-1",
        worker: WorkerReport | None = None,
        client: HubClient | None = None,
    ) -> HeartbeatReply:
        self.sequence += 1
        request = HeartbeatRequest(
            agent_incarnation=incarnation,
            sequence=self.sequence,
            known_revision=self.revision,
            wait_s=wait_s,
            location=self.location,
            worker=worker or WorkerReport(),
        )
        reply = (client or self.client).call("POST", "/v1/node/heartbeat", request, HeartbeatReply)
        self.revision = reply.revision
        return reply


class Beating:
    """Beats in the background, over and over, as an agent does; tolerates an absent hub."""

    def __init__(self, node: NodeOnWire, worker: Callable[[], WorkerReport] = WorkerReport) -> None:
        self.node = node
        self.worker = worker
        self.replies: list[HeartbeatReply] = []
        self.errors: list[CiuicError] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Beating":
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        client = self.node.connect()
        while not self._stop.is_set():
            try:
                self.replies.append(self.node.beat(wait_s=0.3, worker=self.worker(), client=client))
            except CiuicError as error:
                self.errors.append(error)
                self._stop.wait(0.1)

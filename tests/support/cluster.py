"""A whole network as real processes: one hub, nodes with their agents and workers, all on loopback with real TLS.

    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b", "c")
        run = cluster.submit(tiny_job(cluster, nodes=3))
        cluster.finished(run)

Every process carries a mark in its environment, so that the end finds all of them, whatever they did in between.
After a failure the end prints the hub's events and the tail of every log.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
from warm import warm_popen

import ciuic
from ciuic.errors import UnreachableError
from ciuic.net.client import HubClient
from ciuic.net.messages import (
    CreateTokenReply,
    CreateTokenRequest,
    Event,
    NodeInfo,
    NodeInRun,
    RunInfo,
    SubmitReply,
    SubmitRequest,
)

T = TypeVar("T")

SOURCES = Path(ciuic.__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_S = 90.0
"""Longer than anything takes on a busy machine: only a broken test waits so long."""
MARK = "CIUIC_TEST_CLUSTER"
END_S = 20.0
TAIL_LINES = 60


def wait_for(what: Callable[[], T | None], said: str, *, within_s: float = DEADLINE_S) -> T:
    """The first true value of `what`. A hub that is away counts as "not yet"."""
    until = time.monotonic() + within_s
    value: T | None = None
    while time.monotonic() < until:
        with suppress(UnreachableError):
            value = what()
            if value:
                return value
        time.sleep(0.1)
    raise AssertionError(f"not seen within {within_s:.0f} s: {said}; the last value was {value!r}"[:2000])


class Process:
    """One program of ours with a log, in a process group of its own."""

    def __init__(
        self, name: str, log: Path, arguments: list[str], environment: dict[str, str], *, warm: bool = True
    ) -> None:
        """`warm`: see `warm.py`; what changes an interpreter from its start on needs a real one."""
        self.name, self.log = name, log
        with log.open("wb") as out:
            self.popen = warm_popen(
                [sys.executable, "-P", "-m", "ciuic.cli.main", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                forks_workers=arguments[:2] == ["node", "join"],
                warm=warm,
            )

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9 of the process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(END_S)

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.popen.terminate()
        return self.popen.wait(DEADLINE_S)


class Node:
    """One node over all its starts; its home and identity survive them."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.cluster, self.name = cluster, name
        self.url = ""
        """By which it reaches the hub, where that is not the hub's own address."""
        self.starts: list[Process] = []

    def start(self, *, allow_code: bool = True, direct: str = "", **environment: str) -> "Node":
        """The agent; it joins with a token the first time and comes back as the same node later.

        `direct`: where it listens for other nodes.
        """
        warm = not environment
        if not self.starts:
            environment["CIUIC_TOKEN"] = self.cluster.token()
        home = self.cluster.folder / f"node-{self.name}"
        arguments = ["node", "join", self.url or self.cluster.url, "--location", self.name, "--home", str(home)]
        arguments += ["--allow-code"] if allow_code else []
        arguments += ["--direct", direct] if direct else []
        log = self.cluster.folder / f"{self.name}-{len(self.starts)}.log"
        made = self.cluster.environment(**environment)
        self.starts.append(Process(self.name, log, arguments, made, warm=warm))
        return self

    @property
    def agent(self) -> Process:
        return self.starts[-1]

    @property
    def folder(self) -> Path:
        """Where the node keeps its identity and its runs."""
        return self.cluster.folder / f"node-{self.name}" / "nodes" / self.name

    def said(self) -> str:
        """What its agents have said over all starts."""
        return "".join(start.said() for start in self.starts)

    def run_log(self, run_id: str) -> str:
        """What its workers have said in a run."""
        path = self.folder / "runs" / run_id / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def client(self) -> HubClient:
        """A connection with the node's own certificate."""
        files = self.folder
        return self.cluster.client(files / "authority.pem", files / "node.pem", files / "node.key")

    def worker_pids(self) -> list[int]:
        """Training processes (one per rank): what is below the guard, without what they started themselves."""
        with suppress(psutil.Error):
            below = psutil.Process(self.agent.popen.pid).children(recursive=True)
            return sorted(process.pid for process in below if _is_worker(process))
        return []

    def worker_pid(self) -> int:
        """The training process of a node with one rank, once it is there."""
        return wait_for(lambda: next(iter(self.worker_pids()), 0), f"a worker of {self.name}")

    def kill_everything(self) -> None:
        """The machine loses power: agent, guard and workers are gone at once."""
        self.signal_everything(signal.SIGKILL)
        self.agent.popen.wait(END_S)

    def signal_everything(self, number: signal.Signals) -> None:
        """The same signal to agent, guard and workers."""
        below = psutil.Process(self.agent.popen.pid).children(recursive=True)
        for pid in [self.agent.popen.pid, *(process.pid for process in below)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _is_worker(process: psutil.Process) -> bool:
    """A training process itself: not the guard, not torchrun, not a helper of a DataLoader."""

    def has_script(candidate: psutil.Process | None) -> bool:
        line = candidate.cmdline() if candidate is not None else []
        is_launcher = any(part.endswith("guard.py") or part == "torch.distributed.run" for part in line)
        return not is_launcher and any(part.endswith(".py") or part == "ciuic.train.worker" for part in line)

    try:
        return has_script(process) and not has_script(process.parent())
    except psutil.Error:  # it ended while we looked
        return False


class Cluster:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "hub-home"
        self.host = "127.0.0.1"
        """Where the hub listens from its next start on."""
        self.names: tuple[str, ...] = ()
        """Names that its certificate covers."""
        self.nodes: dict[str, Node] = {}
        self.hubs: list[Process] = []
        self.runs: list[str] = []
        self._mark = secrets.token_hex(8)
        self._clients: list[HubClient] = []
        self._operator: HubClient | None = None

    def __enter__(self) -> "Cluster":
        try:
            self.start_hub()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._tell_story()
        for client in self._clients:
            client.close()
        left = self._end_all()
        if kind is None and left:
            raise AssertionError(f"processes outlived their agent and hub: {left}")

    def environment(self, **more: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("CIUIC_", "HF_"))}
        own = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", MARK: self._mark, "HF_HUB_OFFLINE": "1"}
        return {**kept, **own, "HF_HOME": str(self.folder / "hf"), "PYTHONWARNINGS": "error:::ciuic", **more}

    # ---- the hub

    def start_hub(self) -> None:
        """The first time on any free port, later on the same one."""
        port = self.url.rsplit(":", 1)[1] if self.hubs else "0"
        arguments = ["hub", "start", "--host", self.host, "--port", port, "--home", str(self.home)]
        arguments += [part for name in self.names for part in ("--name", name)]
        hub = Process("hub", self.folder / f"hub-{len(self.hubs)}.log", arguments, self.environment())
        self.hubs.append(hub)
        wait_for(lambda: "hub ready at" in hub.said() or not hub.is_alive, "a hub that is ready")
        if not hub.is_alive:
            raise AssertionError(f"the hub did not start: {hub.said()}")

    @property
    def hub(self) -> Process:
        return self.hubs[-1]

    @property
    def url(self) -> str:
        return (self.home / "hub" / "address").read_text().strip()

    def client(self, authority: Path, cert: Path | None, key: Path | None) -> HubClient:
        made = HubClient(self.url, authority.read_bytes(), cert, key, "control")
        self._clients.append(made)
        return made

    @property
    def operator(self) -> HubClient:
        if self._operator is None or self._operator.address.url != self.url:  # the hub may have moved
            folder = self.home / "operator"
            self._operator = self.client(folder / "authority.pem", folder / "operator.pem", folder / "operator.key")
        return self._operator

    def token(self, **options: Any) -> str:
        return self.operator.call("POST", "/v1/tokens", CreateTokenRequest(**options), CreateTokenReply).token

    # ---- nodes and runs

    def add_nodes(self, *names: str, **options: Any) -> list[Node]:
        """Start nodes side by side and wait until the hub has heard all of them."""
        for name in names:
            self.nodes.setdefault(name, Node(self, name)).start(**options)
        added = [self.nodes[name] for name in names]
        for node in added:
            wait_for(lambda n=node: self.node_state(n.name) == "idle" or not n.agent.is_alive, f"node {node.name}")
            if not node.agent.is_alive:
                raise AssertionError(f"{node.name} did not start: {node.said()}")
        return added

    def node_infos(self) -> list[NodeInfo]:
        return self.operator.call("GET", "/v1/nodes", None, list[NodeInfo])

    def node_state(self, name: str) -> str:
        """Empty: the hub has not heard of it since its start. Who was gone before that stays so."""
        gone = ("left", "dead", "evicted")
        found = {x.node_id: x.state for x in self.node_infos() if x.last_seen_s is not None or x.state in gone}
        return found.get(name, "")

    def submit(self, job: dict[str, Any]) -> str:
        reply = self.operator.call("POST", "/v1/runs", SubmitRequest(job=job), SubmitReply)
        self.runs.append(reply.run_id)
        return reply.run_id

    def info(self, run_id: str) -> RunInfo:
        return self.operator.call("GET", f"/v1/runs/{run_id}", None, RunInfo)

    def member(self, run_id: str, name: str) -> NodeInRun:
        """What the run knows of a node; a blank one before it has attached."""
        found = {node.node_id: node for node in self.info(run_id).nodes}
        return found.get(name, NodeInRun(node_id=name, state="starting"))

    def version(self, run_id: str) -> int:
        return max(self.info(run_id).versions, default=0)

    def await_version(self, run_id: str, version: int) -> int:
        """Until the run is that far; the version then."""

        def reached() -> int:
            info = self.info(run_id)
            if info.state in ("failed", "stopped"):
                raise AssertionError(f"{run_id} is {info.state}: {info.reason}")
            now = max(info.versions, default=0)
            return now if now >= version else 0

        return wait_for(reached, f"version {version}")

    def ended(self, run_id: str) -> RunInfo:
        """The run once it has ended and all its nodes are free again."""
        wait_for(lambda: self.info(run_id).state in ("finished", "failed", "stopped"), f"the end of {run_id}")
        at_rest = ("idle", "left", "dead", "evicted")
        wait_for(lambda: all(self.node_state(name) in at_rest for name in self.nodes), "free nodes")
        return self.info(run_id)

    def finished(self, run_id: str) -> RunInfo:
        """The run when it has ended well: every sample committed, none lost, and all nodes agree."""
        info = self.ended(run_id)
        assert info.state == "finished", f"{info.state}: {info.reason}"
        assert info.samples.committed == info.samples.total
        assert info.samples.lost == 0
        assert info.loss_consistent is not False
        assert self.events("push.clipped", "node.set_aside") == [], "honest pushes are no outliers"
        assert {tuple(node.final_digests) for node in info.nodes if node.final_digests} == {tuple(info.digests)}
        return info

    def events(self, *kinds: str) -> list[Event]:
        lines = self.operator.stream_lines("/v1/events?after=0")
        found = [msgspec.json.decode(line, type=Event) for line in lines]
        return [event for event in found if not kinds or event.kind in kinds]

    def await_event(self, kind: str, node: str = "", *, times: int = 1) -> Event:
        """The `times`-th event of a kind about a node."""

        def seen() -> Event | None:
            found = [event for event in self.events(kind) if not node or event.node_id == node]
            return found[times - 1] if len(found) >= times else None

        return wait_for(seen, f"event {kind} {node}")

    # ---- the end

    def _marked(self) -> Iterator[psutil.Process]:
        """Every process of this cluster that still runs."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark:
                    yield process

    def _end_all(self) -> list[str]:
        """kill -9 of agents and hub must be enough: the guards end the rest. What is left then is killed and named."""
        for process in [*(start for node in self.nodes.values() for start in node.starts), *self.hubs]:
            process.kill()
        until = time.monotonic() + END_S
        while any(True for _ in self._marked()) and time.monotonic() < until:
            time.sleep(0.05)
        left = []
        for process in self._marked():
            with suppress(psutil.Error):
                left.append(f"{process.pid} {' '.join(process.cmdline())}")
                process.kill()
        return left

    def _tell_story(self) -> None:
        with suppress(Exception):  # the hub may be what has failed
            for event in self.events():
                print(f"event {event.id} {event.time:.3f} {event.kind} {event.node_id}: {event.text}")
            for run_id in self.runs:
                print(msgspec.json.encode(msgspec.structs.replace(self.info(run_id), rounds=[], job={})).decode())
        for node in self.nodes.values():
            for run_id in self.runs:
                _print_tail(f"{node.name} in {run_id}", node.run_log(run_id))
        for log in sorted(self.folder.glob("*.log")):
            _print_tail(log.name, log.read_text(errors="replace"))


def _print_tail(title: str, text: str) -> None:
    if text:
        print(f"--- {title}", *text.splitlines()[-TAIL_LINES:], sep="\n")

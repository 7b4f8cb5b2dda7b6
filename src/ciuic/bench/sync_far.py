"""A hub and agents at far places: what `ciuic.lab.stage` does over relays, here over namespaces and kernel TCP."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from ciuic.errors import RunFailedError, UnreachableError
from ciuic.lab.crew import CLI, Crew, Hand
from ciuic.lab.stage import operator_client
from ciuic.lab.switch_sites import HUB, Sites
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.net.tls import write_private_file

PORT = 8443
START_S = 90.0
MEASURE_S = 20.0
STOP_S = 10.0
T = TypeVar("T")


class FarNetwork:
    """One hub and one agent per site. Leaving the `with` block ends them all.

    Speak to the hub (`client`) inside `sites.inside(HUB)` only.
    """

    def __init__(self, sites: Sites, folder: Path) -> None:
        self._sites, self._folder = sites, folder
        self._crew = Crew(folder / "logs", owner="benchmark")
        self._hands: dict[str, Hand] = {}
        self.client: HubClient
        self.hub: Hand

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._crew.__exit__()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._crew.__exit__()

    def submit(self, job: dict[str, Any]) -> str:
        """Start a run; its id."""
        return self.client.call("POST", "/v1/runs", m.SubmitRequest(job=job), m.SubmitReply).run_id

    def info(self, run_id: str) -> m.RunInfo:
        """The run as it is. Raises RunFailedError when a process has ended or the run has failed."""
        self._crew.check()
        found = self.client.call("GET", f"/v1/runs/{run_id}", None, m.RunInfo)
        if found.state == "failed":
            raise RunFailedError("the benchmark's run failed", cause=found.reason, next=f"read {self._folder}/logs")
        return found

    def stop(self, run_id: str) -> None:
        """End the run."""
        self.client.call("POST", f"/v1/runs/{run_id}/stop", None, m.Ok)

    def check(self) -> None:
        """Raises RunFailedError when a process has ended by itself."""
        self._crew.check()

    # ---- what may happen to them

    def kill(self, name: str) -> None:
        """kill -9 of a site's agent, its worker and whatever they started; or of the hub."""
        if name == HUB:
            self.client.close()
        self._crew.kill(name)
        self._hands.pop(name)

    def start_node(self, site: str) -> None:
        """Start a site's agent; one that was here before comes back as the node it was."""
        address = self._sites.address(HUB)
        arguments = ["node", "join", f"https://{address}:{PORT}", "--location", site, "--allow-code"]
        arguments += ["--home", str(self._folder / f"node-{site}"), "--token-file", str(self._folder / "token")]
        self._hands[site] = self._run(site, site, arguments)

    def start_hub(self) -> None:
        """Start the hub, also again; returns when it answers."""
        home, address = self._folder / "hub", self._sites.address(HUB)
        self.hub = self._run(HUB, HUB, ["hub", "start", "--home", str(home), "--host", address, "--port", str(PORT)])
        self._hands[HUB] = self.hub
        self.client = self._await(lambda: _connect(home), "the hub")

    def freeze(self, name: str) -> None:
        """SIGSTOP: a machine that says nothing and is not dead."""
        for process in self._below(name):
            process.suspend()

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        for process in reversed(self._below(name)):
            process.resume()

    def _below(self, name: str) -> list[psutil.Process]:
        return psutil.Process(self._hands[name].guard_pid).children(recursive=True)

    # ---- figures

    def hub_cpu_s(self) -> float:
        """Processor time of the hub so far."""
        below = psutil.Process(self.hub.guard_pid).children(recursive=True)
        return sum(sum(process.cpu_times()[:2]) for process in below)

    def _start(self) -> None:
        with self._sites.inside(HUB):
            self.start_hub()
            count = len(self._sites.profile.locations)
            request = m.CreateTokenRequest(lifetime_s=3600, uses=count)
            token = self.client.call("POST", "/v1/tokens", request, m.CreateTokenReply).token
            write_private_file(self._folder / "token", token.encode())
            for site in self._sites.profile.locations:
                self.start_node(site)
            self._await(lambda: self._idle_nodes() == count, "the nodes")
            with contextlib.suppress(RunFailedError):  # the run starts without measurements, too
                self._await(lambda: self._measured_nodes() == count, "measurements", within_s=MEASURE_S)

    def _run(self, name: str, place: str, arguments: Sequence[str]) -> Hand:
        command = self._sites.command(place, [sys.executable, *CLI, *arguments])
        return self._crew.run(name, command, {"OMP_NUM_THREADS": "1", "CIUIC_BENCH_SITE": place})

    def _idle_nodes(self) -> int:
        nodes = self.client.call("GET", "/v1/nodes", None, list[m.NodeInfo])
        return sum(node.state == "idle" and node.last_seen_s is not None for node in nodes)

    def _measured_nodes(self) -> int:
        nodes = self.client.call("GET", "/v1/nodes", None, list[m.NodeInfo])
        return sum("rtt_s" in node.measured for node in nodes)

    def _await(self, what: Callable[[], T | None], said: str, *, within_s: float = START_S) -> T:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            self._crew.check()
            with contextlib.suppress(UnreachableError, FileNotFoundError):
                if value := what():
                    return value
            time.sleep(0.1)
        raise RunFailedError(f"{said} did not come within {within_s:.0f} s", next=f"read {self._folder}/logs")


def _connect(home: Path) -> HubClient:
    client = operator_client(home)
    client.call("GET", "/v1/nodes", None, list[m.NodeInfo])
    return client

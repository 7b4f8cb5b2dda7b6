"""Start agents as real processes and await what they do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from net_server import DEADLINE_S
from warm import warm_popen

import ciuic

SUPPORT = Path(__file__).parent
SOURCES = Path(ciuic.__file__).parents[1]
WORKER = [sys.executable, str(SUPPORT / "net_worker.py")]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll with a deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not seen within {deadline_s} s: {what}")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class HasUrl(Protocol):
    """A hub, small or real."""

    @property
    def url(self) -> str: ...


class AgentProcess:
    """One agent; `home` survives it."""

    def __init__(self, hub: HasUrl, home: Path, *, token: str | None = None, **options: Any) -> None:
        config = {
            "url": hub.url,
            "location": "us-west",
            "home": str(home),
            "heartbeat_s": 0.3,
            "worker_command": WORKER,
            **options,
        }
        self.folder = home / "nodes" / str(config["location"])
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONWARNINGS": "error:::ciuic"}
        environment.pop("CIUIC_TOKEN", None)
        if token is not None:
            environment["CIUIC_TOKEN"] = token
        self.log = home / f"agent-{time.monotonic_ns()}.log"
        home.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = warm_popen(
                [sys.executable, str(SUPPORT / "net_agent.py"), json.dumps(config)], stderr=log, env=environment
            )

    def pids(self, run_id: str) -> list[int]:
        """Every process that the stand-in workers of a run have named so far."""
        path = self.folder / "runs" / run_id / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def said(self) -> str:
        return self.log.read_text()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent has not ended: {self.said()[-2000:]}") from None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

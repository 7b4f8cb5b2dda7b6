"""Labs in tests: their runs, and which of their processes still live."""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ciuic.errors import UnreachableError
from ciuic.lab.lab import Lab, LabConfig, claim_folder, clear_folder
from ciuic.lab.profiles import Profile
from ciuic.net.messages import RunInfo, SubmitReply, SubmitRequest

T = TypeVar("T")
DEADLINE_S = 120.0


def wait_for(what: Callable[[], T | None], said: str, *, within_s: float = DEADLINE_S) -> T:
    """The first true value of `what`; a hub that is away counts as "not yet"."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        with contextlib.suppress(UnreachableError):
            if value := what():
                return value
        time.sleep(0.05)
    raise AssertionError(f"not seen within {within_s:.0f} s: {said}")


def make_lab(folder: Path, profile: Profile, *, namespaces: bool) -> Lab:
    claim_folder(folder)
    clear_folder(folder)
    return Lab(LabConfig(profile=profile, folder=folder, namespaces=namespaces))


def trained(lab: Lab, job: dict[str, Any]) -> RunInfo:
    """Submit a job and wait for its end."""
    with contextlib.closing(lab.client()) as client:
        run_id = client.call("POST", "/v1/runs", SubmitRequest(job=job), SubmitReply).run_id

        def ended() -> RunInfo | None:
            info = client.call("GET", f"/v1/runs/{run_id}", None, RunInfo)
            return info if info.state in ("finished", "failed", "stopped") else None

        return wait_for(ended, f"the end of {run_id}")


def living(folder: Path) -> list[str]:
    """Command lines of processes that work in this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            here = any(str(folder) in word for word in words) or process.environ().get("CIUIC_HOME", "").startswith(
                str(folder)
            )
            if here and process.status() != psutil.STATUS_ZOMBIE and process.pid != psutil.Process().pid:
                found.append(" ".join(words))
    return found


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "ciuic.cli.main", *words]

"""One mode of `ciuic bench sync` on one network: start it at all sites, watch it for a while, end it."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ciuic.bench.sync_far import FarNetwork
from ciuic.errors import RunFailedError
from ciuic.lab.crew import Crew
from ciuic.lab.namespaces import DEVICE
from ciuic.lab.switch_sites import HUB, Sites
from ciuic.net.messages import RunInfo

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-async": {"policy": "async", "max_staleness": 8},
    "ours-gradient": {"send": "gradient"},
    "ours-fragments": {"fragments": 4, "overlap": True},
}
"""What each mode through the hub adds to the job's [sync]."""
BEGIN_S = 180.0
"""So long all sites may take to begin."""
LAST_STEP_S = 90.0
_POLL_S = 0.25
_MANY_SAMPLES = 60_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run, the same for all modes."""

    duration_s: float
    """From the moment when the last site has begun its first step."""
    warm_s: float
    """Of these are not counted in rates."""
    pace_s: float
    snapshot_s: float
    slow: str
    """SITE=FACTOR, or empty."""
    sync: dict[str, Any]
    """The [sync] table of the job."""
    seed: int
    nice: int


@dataclass(kw_only=True)
class Watched:
    """What was seen of one mode. Times are of this machine's monotonic clock."""

    mode: str
    folder: Path
    began_s: float
    plan: Plan
    wire: list[tuple[float, int]] = field(default_factory=list)
    """(time, IP bytes that all hosts have sent so far)."""
    hub_cpu: list[tuple[float, float]] = field(default_factory=list)
    info: RunInfo | None = None
    """Of a run through the hub, at the end."""


def watch_mode(sites: Sites, mode: str, plan: Plan, folder: Path) -> Watched:
    """Run a mode to its end. Raises RunFailedError when a process ends by itself or nothing begins."""
    folder.mkdir(parents=True, exist_ok=True)
    with _running(sites, mode, plan, folder) as (check, hub_cpu_s, ask_info):
        names = sites.profile.locations
        began_s = _await(lambda: _all_began(folder, names), check, BEGIN_S, "the first steps")
        seen = Watched(mode=mode, folder=folder, began_s=began_s, plan=plan)
        end_s = began_s + plan.duration_s
        while time.monotonic() < end_s:
            _look(seen, sites, hub_cpu_s)
            check()
            time.sleep(_POLL_S)
        _look(seen, sites, hub_cpu_s)
        seen.info = ask_info()
        _await(lambda: all(_last_s(folder, name) >= end_s for name in names), check, LAST_STEP_S, "the last steps")
    return seen


def _look(seen: Watched, sites: Sites, hub_cpu_s: Callable[[], float]) -> None:
    sent = sum(t.sent_bytes for t in sites.traffic())
    now = time.monotonic()
    seen.wire.append((now, sent))
    seen.hub_cpu.append((now, hub_cpu_s()))


def _program(mode: str, plan: Plan, folder: Path) -> list[str]:
    program = ["-m", "ciuic.bench.sync_program", "--mode", mode, "--folder", str(folder.resolve())]
    program += [
        "--nice",
        str(plan.nice),
        "--pace-s",
        str(plan.pace_s),
        "--snapshot-s",
        str(plan.snapshot_s),
        "--seed",
        str(plan.seed),
    ]
    return [*program, "--slow", plan.slow] if plan.slow else program


Handles = tuple[Callable[[], object], Callable[[], float], Callable[[], RunInfo | None]]
"""check for dead processes; processor time of the hub; what the hub knows of the run."""


def _running(sites: Sites, mode: str, plan: Plan, folder: Path) -> contextlib.AbstractContextManager[Handles]:
    if mode in OURS:
        return _through_hub(sites, plan, folder, OURS[mode])
    return _directly(sites, mode, plan, folder)


@contextlib.contextmanager
def _through_hub(sites: Sites, plan: Plan, folder: Path, way: dict[str, Any]) -> Generator[Handles]:
    sync = way if "send" in way else {**plan.sync, **way}
    with FarNetwork(sites, folder) as network, sites.inside(HUB):
        job = {
            "name": "bench",
            "model": {"command": ["python", *_program("ours", plan, folder)]},
            "nodes": {"min": len(sites.profile.locations)},
            "sync": sync,
            "train": {"samples": _MANY_SAMPLES, "seed": plan.seed, "evaluate_every": 1_000_000},
        }
        run_id = network.submit(job)
        yield lambda: network.info(run_id), network.hub_cpu_s, lambda: network.info(run_id)
        network.stop(run_id)


@contextlib.contextmanager
def _directly(sites: Sites, mode: str, plan: Plan, folder: Path) -> Generator[Handles]:
    names = sites.profile.locations
    place = ["--sites", str(len(names)), "--address", sites.address(names[0])]
    with Crew(folder / "logs", owner="benchmark") as crew:
        for number, name in enumerate(names):
            own = ["--site", name, "--number", str(number)]
            command = [sys.executable, *_program(mode, plan, folder), *place, *own]
            environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
            crew.run(name, sites.command(name, command), environment)
        yield crew.check, lambda: 0.0, lambda: None


def _await(what: Callable[[], float], check: Callable[[], object], within_s: float, said: str) -> float:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        check()
        if value := what():
            return value
        time.sleep(_POLL_S)
    raise RunFailedError(f"{said} did not come within {within_s:.0f} s")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines that a site has written so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _all_began(folder: Path, names: tuple[str, ...]) -> float:
    """When the last site began its first step; 0.0 as long as one has not."""
    first = [next(iter(read_lines(folder / f"{name}.jsonl")), None) for name in names]
    return max(line["at_s"] for line in first if line) if all(first) else 0.0


def _last_s(folder: Path, name: str) -> float:
    return max((line["at_s"] for line in read_lines(folder / f"{name}.jsonl")), default=0.0)

"""The trial of `ciuic bench resilience`: what is done to site ap and to the hub, and what the others notice."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ciuic.bench import sync_task as task
from ciuic.bench.resilience_lines import SiteLog, Window, read_site, stall_s, usual_step_s
from ciuic.bench.sync_far import FarNetwork
from ciuic.errors import RunFailedError
from ciuic.lab.switch_sites import HUB, Sites
from ciuic.net.messages import NodeInRun, RunInfo

WARM_S = 25.0
AFTER_S = 15.0
BEGIN_S = 180.0
REJOIN_S = 120.0
VICTIM = "ap"
EVENTS = ("kill", "rejoin", "silence", "hub-away")
_POLL_S = 0.1
_MANY_SAMPLES = 60_000


class Limits:
    """What may be expected."""

    transfers = 1.3
    rejoin_s = 10.0
    """A joiner's first push takes its interval of steps, beside the transfer of the model."""
    outage_stall_steps = 1.5


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is run."""

    bits_per_s: float
    outage_s: float
    stop_s: float
    pace_s: float
    deadline_s: float
    seed: int
    nice: int
    only: str = ""
    """One of EVENTS and what it needs; empty: all."""
    rejoins: int = 1
    """So often ap is killed and comes back."""


def run_trial(sites: Sites, trial: Trial, folder: Path, tell: Callable[[str], object]) -> dict[str, Any]:
    """All events one after the other on one run. Raises RunFailedError."""
    with FarNetwork(sites, folder) as network, sites.inside(HUB):
        case = _Case(network, trial, folder, sites.profile.locations)
        case.begin()
        found: dict[str, Any] = {"usual_step_s": round(case.usual_s, 3)}
        for name, event in case.events().items():
            found |= event()
            tell(f"{name}: {', '.join(f'{key} {value}' for key, value in case.latest.items())}")
        network.stop(case.run_id)
        found |= {
            "mbit_per_s": trial.bits_per_s / 1e6,
            "outage_s": trial.outage_s,
            "stop_s": trial.stop_s,
            "deadline_s": trial.deadline_s,
            "marks": case.marks,
            "rejoin_timelines": case.timelines,
            "steps": case.step_points(),
        }
        return found


class _Case:
    """The run, its sites and what was found."""

    def __init__(self, network: FarNetwork, trial: Trial, folder: Path, names: tuple[str, ...]) -> None:
        self._network, self._trial, self._folder, self._names = network, trial, folder, names
        self.run_id = ""
        self.usual_s = 0.0
        self.marks: list[tuple[float, str]] = []
        """(seconds since the begin, what was done)."""
        self.latest: dict[str, Any] = {}
        self.timelines: list[list[tuple[float, str]]] = []
        """Of each return: (seconds since torch was imported, what the joiner did)."""
        self._began_s = 0.0

    def events(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """In this order."""
        every = {"kill": self._kill, "rejoin": self._rejoins, "silence": self._silence, "hub-away": self._hub_away}
        only = self._trial.only
        needed = ("kill", "rejoin") if only == "rejoin" else (only,)
        return {name: event for name, event in every.items() if not only or name in needed}

    # ---- the beginning

    def begin(self) -> None:
        """Submit the run, wait for its first steps, learn how long a step usually takes."""
        program = ["python", "-m", "ciuic.bench.resilience_program", "--folder", str(self._folder)]
        program += ["--pace-s", str(self._trial.pace_s), "--seed", str(self._trial.seed)]
        job = {
            "name": "resilience",
            "model": {"command": [*program, "--nice", str(self._trial.nice)]},
            "nodes": {"min": len(self._names)},
            "sync": {"deadline": f"{self._trial.deadline_s:g} s"},
            "train": {"samples": _MANY_SAMPLES, "seed": self._trial.seed, "evaluate_every": 1_000_000},
        }
        self.run_id = self._network.submit(job)
        self._until(lambda: all(self._log(name).first("step", 0.0) for name in self._names), BEGIN_S, "the first steps")
        self._began_s = time.monotonic()
        self._wait(WARM_S)
        window = Window(start_s=self._began_s + WARM_S / 2, stop_s=time.monotonic() - self._trial.pace_s)
        self.usual_s = usual_step_s([self._log(name) for name in self._names], window)

    # ---- what happens

    def _kill(self) -> dict[str, Any]:
        before = self._survivors_in_run()
        since_s = self._mark("kill -9 of ap")
        self._network.kill(VICTIM)
        self._wait(AFTER_S)
        stalled_s = self._stall_s(since_s)
        return self._found(
            kill_survivor_stall_s=round(stalled_s, 3),
            kill_survivor_stall_steps=round(stalled_s / self.usual_s, 3),
            kill_survivor_lost_steps=self._lost_steps(before),
        )

    def _rejoins(self) -> dict[str, Any]:
        """Once or several times; the worst of them counts."""
        found = [self._rejoin()]
        while len(found) < self._trial.rejoins:
            self._network.kill(VICTIM)
            self._wait(AFTER_S / 3)
            found.append(self._rejoin())
        worst = max(found, key=lambda one: one["rejoin_s"])
        slowdown = max(one["heal_survivor_slowdown"] for one in found)
        return self._found(
            **worst | {"heal_survivor_slowdown": slowdown, "rejoins_s": [one["rejoin_s"] for one in found]}
        )

    def _rejoin(self) -> dict[str, Any]:
        earlier = self._in_run(VICTIM)
        since_s = self._mark("ap comes back")
        self._network.start_node(VICTIM)
        merged = lambda: self._merged_since(earlier)  # noqa: E731 - one line says it
        self._until(merged, REJOIN_S, "the rejoined node's first push")
        counted_s = self._mark("its first push counts")
        imported_s = self._log(VICTIM).first("imported", since_s)
        if imported_s is None:
            raise RunFailedError("the rejoined node has written nothing")
        healing = Window(start_s=since_s, stop_s=counted_s)
        slowdown = usual_step_s(self._survivors(), healing) / self.usual_s
        transfer_s = 4 * 8 * sum(p.numel() for p in task.make_model(0).parameters()) / self._trial.bits_per_s
        self._wait(AFTER_S / 2)
        self.timelines.append(self._log(VICTIM).timeline(imported_s, counted_s))
        return {
            "rejoin_s": round(counted_s - imported_s, 2),
            "rejoin_from_start_s": round(counted_s - since_s, 2),
            "transfer_s": round(transfer_s, 2),
            "rejoin_limit_s": round(Limits.transfers * transfer_s + Limits.rejoin_s, 2),
            "heal_survivor_slowdown": round(slowdown, 4),
        }

    def _silence(self) -> dict[str, Any]:
        before = self._survivors_in_run()
        since_s = self._mark("SIGSTOP of ap")
        self._network.freeze(VICTIM)
        self._wait(self._trial.stop_s)
        self._mark("SIGCONT")
        self._network.thaw(VICTIM)
        self._wait(AFTER_S)
        return self._found(
            stop_survivor_stall_s=round(self._stall_s(since_s), 3), stop_survivor_lost_steps=self._lost_steps(before)
        )

    def _hub_away(self) -> dict[str, Any]:
        before = {name: self._in_run(name) for name in self._names}
        pids = {name: self._log(name).pids for name in self._names}
        versions = self._info().versions
        since_s = self._mark("kill -9 of the hub")
        self._network.kill(HUB)
        self._wait(self._trial.outage_s)
        self._mark("the hub is back")
        self._network.start_hub()
        settled = lambda: all(self._in_run(n).pushes_merged > before[n].pushes_merged for n in self._names)  # noqa: E731
        self._until(settled, REJOIN_S, "pushes after the hub's return")
        self._wait(AFTER_S)
        exits = sum(self._log(name).pids != pids[name] for name in self._names)
        info = self._info()
        logs = [self._log(name) for name in self._names]
        stalled_s = stall_s(logs, Window(start_s=since_s, stop_s=time.monotonic()), self.usual_s)
        return self._found(
            hub_outage_exits=exits,
            **{f"hub_outage_{self._trial.outage_s:g}s_exits": exits},
            hub_outage_lost_pushes=sum(self._lost(self._in_run(name), before[name]) for name in self._names),
            hub_outage_stall_s=round(stalled_s, 3),
            hub_outage_versions_went_back=any(now < then for now, then in zip(info.versions, versions, strict=True)),
        )

    # ---- looking

    def _stall_s(self, since_s: float) -> float:
        return stall_s(self._survivors(), Window(start_s=since_s, stop_s=time.monotonic()), self.usual_s)

    def _survivors(self) -> list[SiteLog]:
        return [self._log(name) for name in self._names if name != VICTIM]

    def _survivors_in_run(self) -> dict[str, NodeInRun]:
        return {name: self._in_run(name) for name in self._names if name != VICTIM}

    def _lost_steps(self, before: dict[str, NodeInRun]) -> int:
        return sum(self._lost(self._in_run(name), then) * max(1, then.interval) for name, then in before.items())

    @staticmethod
    def _lost(now: NodeInRun, then: NodeInRun) -> int:
        """Pushes of a node since then whose work does not count; one may still wait for its round."""
        waiting = max(0, now.pushes_accepted - now.pushes_merged - now.pushes_rejected - 1)
        return now.pushes_rejected - then.pushes_rejected + waiting

    def _merged_since(self, earlier: NodeInRun) -> bool:
        now = self._in_run(VICTIM)
        return now.incarnation > earlier.incarnation and now.pushes_merged > earlier.pushes_merged

    def _in_run(self, name: str) -> NodeInRun:
        return next(node for node in self._info().nodes if node.node_id == name)

    def _info(self) -> RunInfo:
        return self._network.info(self.run_id)

    def _log(self, name: str) -> SiteLog:
        return read_site(self._folder / f"{name}.jsonl")

    def step_points(self) -> dict[str, list[tuple[float, float]]]:
        """Per site: (when a step ended since the begin, its length), in seconds."""
        found: dict[str, list[tuple[float, float]]] = {}
        for name in self._names:
            ends = [line for line in self._log(name).lines if line["event"] in ("begin", "step")]
            pairs = [(a, b) for a, b in pairwise(ends) if a["pid"] == b["pid"]]
            found[name] = [(round(b["at_s"] - self._began_s, 2), round(b["at_s"] - a["at_s"], 3)) for a, b in pairs]
        return found

    # ---- time

    def _mark(self, what: str) -> float:
        now_s = time.monotonic()
        self.marks.append((round(now_s - self._began_s, 2), what))
        return now_s

    def _found(self, **numbers: Any) -> dict[str, Any]:
        self.latest = numbers
        return numbers

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)
        self._network.check()

    def _until(self, what: Callable[[], object], within_s: float, said: str) -> None:
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            self._network.check()
            if what():
                return
            time.sleep(_POLL_S)
        raise RunFailedError(f"{said} did not come within {within_s:.0f} s", next=f"read {self._folder}/logs")

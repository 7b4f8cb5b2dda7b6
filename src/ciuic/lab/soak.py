"""`ciuic lab soak`: real runs while something fails all the time, and the proof that nothing is lost.

A lab with a hub and some nodes; one thread submits run after run (`soak_runs`), one looks at memory, files and threads
(`soak_meter`), and this one does what `soak_plan` has planned. When a property does not hold the soak ends at once.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ciuic.errors import CheckFailedError, CiuicError, UsageError
from ciuic.lab.lab import Lab, LabConfig, claim_folder, clear_folder
from ciuic.lab.lab_state import held
from ciuic.lab.links import Link
from ciuic.lab.profiles import Profile, Site
from ciuic.lab.soak_faults import heal_all, strike
from ciuic.lab.soak_meter import Meter, leaks
from ciuic.lab.soak_plan import NEWCOMER, PlannedFault, plan_faults
from ciuic.lab.soak_report import FaultDone, Property, SoakReport, closing_lines
from ciuic.lab.soak_runs import Pacing, Runs
from ciuic.lab.tally import machine_facts

BEGIN_S = 420.0
REST_S = 60.0
POLL_S = 0.2
_RUN_FAULTS = 4.0
"""A run should last for about so many faults."""
_LEAST_RUN_S = 30.0
_TRACE = "Traceback (most recent call last)"


@dataclass(frozen=True, kw_only=True)
class SoakConfig:
    """How to soak. Raises UsageError for times that cannot be."""

    folder: Path
    duration_s: float
    """From the first fault on; the last run comes to its end after it."""
    every_s: float
    seed: int
    nodes: int
    namespaces: bool

    def __post_init__(self) -> None:
        if not 2 <= self.every_s <= self.duration_s:
            raise UsageError(
                f"a fault every {self.every_s:g} s in {self.duration_s:g} s cannot be",
                cause="a fault needs at least 2 s, and the soak at least one fault",
            )


def soak_profile(nodes: int) -> Profile:
    """So many sites 20 to 60 ms away at 50 Mbit/s, and one for a node that joins and leaves."""
    names = [*(f"n{number}" for number in range(1, nodes + 1)), NEWCOMER]
    sites = [
        Site(
            link=Link(name=name, up_bits_per_s=50e6, down_bits_per_s=50e6, one_way_delay_s=0.01 + 0.01 * (number % 3)),
            claimed={},
        )
        for number, name in enumerate(names)
    ]
    pairs = {frozenset({a, b}): 0.06 for a in names for b in names if a != b}
    return Profile(name="soak", hub_location="a data centre", sites=tuple(sites), round_trips_s=pairs)


def run_soak(config: SoakConfig, say: Callable[[str], None]) -> SoakReport:
    """From the first process to the proof, which is also written to soak.json; no process is left.

    Raises UsageError when the folder cannot be used. What did not hold is in the report, not raised.
    """
    claim_folder(config.folder)
    with held(config.folder):
        clear_folder(config.folder)
        began = time.monotonic()
        lab_config = LabConfig(
            profile=soak_profile(config.nodes), folder=config.folder, namespaces=config.namespaces, seed=config.seed
        )
        with Lab(lab_config) as lab:
            say(
                f"soak: {config.nodes} nodes over {lab.network.kind}, seed {config.seed}; everything is in {lab.folder}"
            )
            soak = _Soak(config, lab, say)
            soak.run()
        left = [process for process in soak.everything if _is_alive(process)]
        report = soak.report(time.monotonic() - began, left)
    report.write(config.folder / "soak.json")
    for line in closing_lines(report, config.folder):
        say(line)
    return report


class _Soak:
    """See run_soak."""

    def __init__(self, config: SoakConfig, lab: Lab, say: Callable[[str], None]) -> None:
        self._config, self._lab, self._say = config, lab, say
        self._places = tuple(place for place in lab.sites if place != NEWCOMER)
        self._faults: list[FaultDone] = []
        self._failure: CiuicError | None = None
        self._rest = Property(name="only the hub and the agents are left when nothing trains", holds=False, detail="")
        self._began = time.monotonic()
        run_s = max(_LEAST_RUN_S, _RUN_FAULTS * config.every_s)
        pacing = Pacing(seed=config.seed, least_nodes=2, run_s=run_s)
        self._runs = Runs(lab, pacing, lambda: list(self._faults), self._tell)
        self._meter: Meter | None = None
        self.everything: set[psutil.Process] = set()
        """Every process that was seen."""

    def run(self) -> None:
        """Until the duration is over and the last run has ended, or until something does not hold."""
        lab = self._lab
        try:
            lab.start_hub()
            for place in self._places:
                lab.start_node(place)
            lab.await_nodes(self._places)
            self._meter = Meter(lab)
            self._runs.start()
            self._runs.first_moved.wait(BEGIN_S)
            self._began = time.monotonic()
            self._strike_all()
            if self._runs.failure is None:
                heal_all(lab, self._places)
                self._runs.finish()
            self._check()
            self._rest = self._at_rest()
        except CiuicError as error:
            self._failure = error
            self._say(f"{self._now_s:8.1f} s  ended: {error}")
        finally:
            if self._meter is not None:
                self._meter.close()
            self._remember()

    # ---- faults

    def _strike_all(self) -> None:
        config = self._config
        count = int(config.duration_s // config.every_s)
        for fault in plan_faults(config.seed, count, self._places, config.every_s):
            due = self._began + (fault.number - 1) * config.every_s
            self._until(due)
            self._strike(fault)
            self._remember()
        self._until(self._began + config.duration_s)

    def _strike(self, fault: PlannedFault) -> None:
        at_s = round(self._now_s, 1)
        heal, note = strike(self._lab, fault)
        done = FaultDone(
            number=fault.number, at_s=at_s, kind=fault.kind, place=fault.place, lasts_s=fault.lasts_s, note=note
        )
        self._faults.append(done)
        self._say(done.line)
        with (self._lab.folder / "logs" / "faults.jsonl").open("a") as file:
            file.write(json.dumps(asdict(done)) + "\n")
        self._until(time.monotonic() + fault.lasts_s)
        heal()

    def _until(self, due: float) -> None:
        """Raises CheckFailedError when something does not hold meanwhile."""
        while True:
            self._check()
            left_s = due - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(POLL_S, left_s))

    def _check(self) -> None:
        if self._runs.failure is not None:
            raise self._runs.failure
        for place, code in self._lab.ended().items():
            raise CheckFailedError(
                "every process lives, or was ended by a fault",
                cause=f"the process of {place} has ended by itself with exit code {code}",
                next=f"read {self._lab.log(place)}",
            )

    # ---- what is left

    def _at_rest(self) -> Property:
        """Once nothing trains: one process per place, and no other."""
        until = time.monotonic() + REST_S
        while True:
            more = {place: self._below(place) for place in self._lab.network.places if self._lab.runs(place)}
            wrong = {place: lines for place, lines in more.items() if len(lines) != 1}
            if not wrong or time.monotonic() > until:
                break
            time.sleep(POLL_S)
        detail = f"{wrong}" if wrong else f"{len(more)} processes, one each"
        return Property(name=self._rest.name, holds=not wrong, detail=detail[:600])

    def _below(self, place: str) -> list[str]:
        found = []
        for process in self._lab.processes(place):
            with contextlib.suppress(psutil.Error):
                found.append(f"{process.pid} {process.status()} {' '.join(process.cmdline()[-4:])}")
        return found

    def _remember(self) -> None:
        for place in self._lab.network.places:
            if self._lab.runs(place):
                with contextlib.suppress(CiuicError):
                    self.everything.update(self._lab.processes(place))

    # ---- the proof

    def report(self, wall_s: float, left: list[psutil.Process]) -> SoakReport:
        """After the end of all processes."""
        growth = self._meter.growth() if self._meter is not None else []
        properties = [*self._properties(), *self._tidy(left)]
        return SoakReport(
            seed=self._config.seed,
            duration_s=self._config.duration_s,
            every_s=self._config.every_s,
            nodes=self._config.nodes,
            network=self._lab.network.kind,
            wall_s=round(wall_s, 1),
            machine=machine_facts(),
            faults=self._faults,
            runs=self._runs.done,
            growth=growth,
            properties=properties,
            stopped_by=self._failure.message if self._failure is not None else "",
            holds=all(each.holds for each in properties),
        )

    def _properties(self) -> list[Property]:
        """What the runs have shown, each only as far as it was looked at."""
        runs = self._runs.done
        versions = sum(max(run.versions, default=0) for run in runs)
        doubles, lost = sum(run.duplicated for run in runs), sum(run.lost for run in runs)
        samples = sum(run.samples for run in runs)
        found = []
        if self._failure is not None:
            detail = "; ".join(part for part in (self._failure.cause, self._failure.next) if part)
            found.append(Property(name=self._failure.message, holds=False, detail=detail))
        agreeing = sum(run.agreeing for run in runs)
        facts = (
            ("versions are monotone", f"{versions} versions of {len(runs)} runs, looked at {self._runs.looks} times"),
            ("digests are equal at the end of each run", f"{agreeing} times a node told the hub's own digests"),
            (
                "samples are trained exactly once",
                f"{samples} committed, {lost} lost, {doubles} counted doubles, all after faults",
            ),
            ("every run finishes", f"{len(runs)} runs"),
        )
        holds = agreeing > 0 and not lost
        return [*found, *(Property(name=name, holds=holds, detail=detail) for name, detail in facts)]

    def _tidy(self, left: list[psutil.Process]) -> list[Property]:
        growth = self._meter.growth() if self._meter is not None else []
        leaking = [text for each in growth for text in leaks(each)]
        traces = [place for place in self._lab.network.places if _TRACE in _text(self._lab.log(place))]
        longest = (
            f"{len(growth)} processes, the longest for {growth[0].life_s:.0f} s" if growth else "none lived long enough"
        )
        found = [
            Property(
                name="memory, files and threads do not grow", holds=not leaking, detail="; ".join(leaking) or longest
            ),
            Property(
                name="no hub and no agent had a bug to report",
                holds=not traces,
                detail=f"a traceback in the log of {', '.join(traces)}" if traces else "no traceback in their logs",
            ),
            Property(
                name="nothing outlives the soak",
                holds=not left,
                detail=f"{[process.pid for process in left]}" if left else f"{len(self.everything)} processes are gone",
            ),
        ]
        return found if self._failure is not None else [self._rest, *found]

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, text: str) -> None:
        self._say(f"{self._now_s:8.1f} s  {text}")


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""

"""What a soak has shown: its faults, its runs, and the properties that must hold, as JSON and as lines."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ciuic.units import format_count, format_duration


@dataclass(frozen=True, kw_only=True)
class FaultDone:
    """A fault that happened."""

    number: int
    at_s: float
    """Since the soak's first fault was due."""
    kind: str
    place: str
    lasts_s: float
    note: str = ""

    @property
    def line(self) -> str:
        lasting = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.at_s:8.1f} s  fault {self.number}: {self.kind} at {self.place}{lasting}{note}"


@dataclass(frozen=True, kw_only=True)
class RunDone:
    """A run of a soak at its end."""

    run_id: str
    mode: str
    state: str
    wall_s: float
    versions: list[int]
    samples: int
    duplicated: int
    doubles_by: list[str]
    """Nodes that trained a sample which another push had too."""
    lost: int
    incarnations: int
    """Workers that took part, over all nodes."""
    pushes: int
    agreeing: int
    """Nodes that reported the hub's digests at the end."""
    faults: list[int]
    """Numbers of those that happened meanwhile."""
    loss_first: float
    loss_last: float

    @property
    def line(self) -> str:
        doubles = f", {self.duplicated} trained twice" if self.duplicated else ""
        return (
            f"{self.run_id} ({self.mode}) {self.state} after {format_duration(self.wall_s)}: version "
            f"{max(self.versions, default=0)}, {format_count(self.samples)} samples{doubles}, {self.incarnations} "
            f"worker starts, loss {self.loss_first:.2f} -> {self.loss_last:.2f}, {len(self.faults)} faults"
        )


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How a process has grown between the beginning of its life (after the warm-up) and its end."""

    place: str
    pid: int
    life_s: float
    memory_bytes: tuple[float, float]
    files: tuple[float, float]
    threads: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Property:
    """Something that must hold."""

    name: str
    holds: bool
    detail: str

    @property
    def line(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}  {self.name}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class SoakReport:
    """Everything."""

    seed: int
    duration_s: float
    every_s: float
    nodes: int
    network: str
    wall_s: float
    machine: dict[str, str]
    faults: list[FaultDone]
    runs: list[RunDone]
    growth: list[Growth]
    properties: list[Property]
    stopped_by: str = ""
    """The property that ended the soak before its time."""
    holds: bool = field(default=False)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def closing_lines(report: SoakReport, folder: Path) -> list[str]:
    """The proof; after a failure the history of the faults first, and the violated property before all others."""
    broken = [found for found in report.properties if not found.holds]
    lines = ["", "the faults before it:", *(fault.line for fault in report.faults)] if broken else [""]
    lines += [*(found.line for found in broken), *(found.line for found in report.properties if found.holds)]
    kinds = sorted({fault.kind for fault in report.faults})
    counts = f"{len(report.faults)} faults ({', '.join(kinds)}), {_finished(report.runs)} runs finished"
    lines += ["", f"seed {report.seed}: {counts} in {format_duration(report.wall_s)}"]
    if broken:
        lines.append(
            f"once more: ciuic lab soak --seed {report.seed} {_options(report)}; logs are in {folder / 'logs'}"
        )
    return [*lines, f"numbers  {folder / 'soak.json'}"]


def _finished(runs: Sequence[RunDone]) -> int:
    return sum(run.state == "finished" for run in runs)


def _options(report: SoakReport) -> str:
    relay = " --relay" if report.network == "relay" else ""
    return f"--duration {report.duration_s:g}s --every {report.every_s:g}s --nodes {report.nodes}{relay}"

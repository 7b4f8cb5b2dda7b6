"""From what was seen of a mode to its numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from ciuic.bench.sync_modes import Watched, read_lines
from ciuic.bench.sync_program import WATCHED

GRID_S = 15.0
"""Held-out losses are told at multiples of this."""


@dataclass(frozen=True, kw_only=True)
class SiteLine:
    """Steps of one site: when each ended (the first point is the begin of the first step) and tokens so far."""

    at_s: np.ndarray
    tokens: np.ndarray
    exposed_s: np.ndarray
    """Of each step, on top of the pace."""
    side_cpu_s: float
    """Processor time outside the training thread, from the first step's end to the last's."""

    def tokens_at(self, at_s: float) -> float:
        """A step in progress counts by the part of its time that has passed."""
        return float(np.interp(at_s, self.at_s, self.tokens))


def read_site(path: Path) -> SiteLine:
    """From the file that a site has written."""
    begin, *steps = read_lines(path)
    side = [step["cpu_s"] - step["main_cpu_s"] for step in steps]
    return SiteLine(
        at_s=np.array([begin["at_s"], *(s["at_s"] for s in steps)]),
        tokens=np.array([0, *(s["tokens"] for s in steps)], dtype=float),
        exposed_s=np.array([s["exposed_s"] for s in steps]),
        side_cpu_s=side[-1] - side[0],
    )


def mode_numbers(seen: Watched, names: tuple[str, ...]) -> dict[str, Any]:
    """Rates over the time after the warm-up, and where the time went; JSON-able."""
    start_s, end_s = seen.began_s + seen.plan.warm_s, seen.began_s + seen.plan.duration_s
    sites = {name: read_site(seen.folder / f"{name}.jsonl") for name in names}
    tokens = {name: line.tokens_at(end_s) - line.tokens_at(start_s) for name, line in sites.items()}
    window_s, total = end_s - start_s, sum(tokens.values())
    inside = {name: _within(line, start_s, end_s) for name, line in sites.items()}
    found = {
        "tokens_per_s": round(total / window_s, 1),
        "tokens_per_s_by_site": {name: round(value / window_s, 1) for name, value in tokens.items()},
        "wire_bytes_per_token": round((_at(seen.wire, end_s) - _at(seen.wire, start_s)) / total, 1),
        "longest_step_s": round(max(float(steps.max(initial=0.0)) for steps, _ in inside.values()), 2),
        "median_exposed_s": round(median(float(np.median(e)) if len(e) else 0.0 for _, e in inside.values()), 4),
        "mean_exposed_s": round(mean(float(np.mean(e)) if len(e) else 0.0 for _, e in inside.values()), 4),
        "comm_cpu_s": round(mean(line.side_cpu_s for line in sites.values()), 2),
        "trained_s": round(seen.plan.duration_s, 1),
    }
    if seen.info is not None:
        found |= _hub_numbers(seen, start_s, end_s)
    return found


def _hub_numbers(seen: Watched, start_s: float, end_s: float) -> dict[str, Any]:
    info = seen.info
    if info is None:
        return {}
    nodes = info.nodes
    return {
        "comm_cpu_s": round(mean(node.communication_cpu_s for node in nodes), 2),
        "hub_cpu_s": round(_at(seen.hub_cpu, end_s) - _at(seen.hub_cpu, start_s), 2),
        "entries": max(info.versions, default=0),
        "sync": info.sync,
        "intervals": {node.node_id: node.interval for node in nodes},
        "pushes": {
            node.node_id: {
                "accepted": node.pushes_accepted,
                "merged": node.pushes_merged,
                "rejected": node.pushes_rejected,
            }
            for node in nodes
        },
        "communication_s": {node.node_id: round(node.communication_s, 2) for node in nodes},
        "push_bytes": info.push_bytes,
        "entry_bytes": info.entry_bytes,
    }


def _within(line: SiteLine, start_s: float, end_s: float) -> tuple[np.ndarray, np.ndarray]:
    """(lengths of the steps that touch the window, what they exposed)."""
    touches = (line.at_s[1:] > start_s) & (line.at_s[:-1] < end_s)
    return np.diff(line.at_s)[touches], line.exposed_s[touches]


def _at(points: list[tuple[float, float]] | list[tuple[float, int]], at_s: float) -> float:
    return float(np.interp(at_s, [p[0] for p in points], [p[1] for p in points]))


def losses(seen: Watched, judge: Callable[[np.ndarray], float], initial: np.ndarray) -> list[tuple[float, float]]:
    """(seconds since the begin, held-out loss) of the watched site's parameters; the files are deleted."""
    points = [(0.0, judge(initial))]
    files = sorted(seen.folder.glob(f"{WATCHED}-*.npy"), key=_time_of)
    for file in files:
        if not file.name.endswith(".part.npy"):
            points.append((_time_of(file) - seen.began_s, judge(np.load(file))))
        file.unlink()
    return [(round(at_s, 2), round(loss, 4)) for at_s, loss in points]


def _time_of(file: Path) -> float:
    return float(file.name.removeprefix(f"{WATCHED}-").removesuffix(".npy").removesuffix(".part"))


def loss_at(points: list[tuple[float, float]], at_s: float) -> float:
    """Between two points in proportion."""
    return round(float(np.interp(at_s, [p[0] for p in points], [p[1] for p in points])), 4)


def grid(duration_s: float) -> list[float]:
    """The seconds at which losses are told."""
    return [float(s) for s in np.arange(GRID_S, duration_s + 0.5, GRID_S)] or [duration_s]


def below_from_s(
    ours: list[tuple[float, float]], others: list[list[tuple[float, float]]], duration_s: float
) -> float | None:
    """The first grid second from which our loss is below all the others' to the end; None: never."""
    since: float | None = None
    for at_s in grid(duration_s):
        if all(loss_at(ours, at_s) < loss_at(other, at_s) for other in others):
            since = at_s if since is None else since
        else:
            since = None
    return since


def total_tokens_at(seen: Watched, names: tuple[str, ...], since_begin_s: float) -> float:
    """Of all sites together."""
    lines = [read_site(seen.folder / f"{name}.jsonl") for name in names]
    return sum(line.tokens_at(seen.began_s + since_begin_s) for line in lines)

"""From the lines that the sites wrote to what an event cost them. Pure."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ciuic.errors import RunFailedError


@dataclass(frozen=True, kw_only=True)
class Window:
    """A span of the machine's monotonic clock."""

    start_s: float
    stop_s: float


@dataclass(frozen=True, kw_only=True)
class SiteLog:
    """What the processes of one site did, in order."""

    lines: tuple[dict[str, Any], ...]

    @property
    def pids(self) -> list[int]:
        """Its training processes, in order of appearance."""
        return list(dict.fromkeys(line["pid"] for line in self.lines))

    def first(self, event: str, after_s: float) -> float | None:
        """When an event first happened after a time."""
        return next((x["at_s"] for x in self.lines if x["event"] == event and x["at_s"] > after_s), None)

    def timeline(self, start_s: float, stop_s: float) -> list[tuple[float, str]]:
        """What its process did between two times: (seconds since the first one, what)."""
        within = [x for x in self.lines if start_s <= x["at_s"] <= stop_s]
        return [(round(x["at_s"] - start_s, 2), x.get("text", x["event"])) for x in within]

    def steps(self, window: Window) -> list[float]:
        """Lengths in seconds of the steps that touch a window, between two ends of steps of one process.

        A step that has not ended within the log counts up to the window's end.
        """
        ends = [(x["pid"], x["at_s"]) for x in self.lines if x["event"] in ("begin", "step")]
        found = [
            later - earlier
            for (pid, earlier), (other, later) in pairwise(ends)
            if pid == other and later > window.start_s and earlier < window.stop_s
        ]
        if ends and ends[-1][1] < window.stop_s:
            found.append(window.stop_s - ends[-1][1])
        return found


def read_site(path: Path) -> SiteLog:
    """The whole lines of a file; none when it is not there yet."""
    if not path.exists():
        return SiteLog(lines=())
    text = path.read_text().splitlines(keepends=True)
    return SiteLog(lines=tuple(json.loads(line) for line in text if line.endswith("\n")))


def usual_step_s(sites: Iterable[SiteLog], window: Window) -> float:
    """Median length of a step of these sites. Raises RunFailedError when they made none."""
    found = [length for site in sites for length in site.steps(window)]
    if not found:
        raise RunFailedError("the sites made no step", next="see the logs beside the results")
    return median(found)


def stall_s(sites: Iterable[SiteLog], window: Window, usual_s: float) -> float:
    """By how much the longest step of any of these sites exceeds the usual one."""
    return max((max(site.steps(window), default=0.0) - usual_s for site in sites), default=0.0)

"""Memory, files and threads of the hub and the agents over time, and whether they only ever grow."""

import contextlib
import statistics
import threading
import time
from dataclasses import dataclass

import psutil

from ciuic.lab.lab import Lab
from ciuic.lab.soak_report import Growth

EVERY_S = 2.0
WARM_UP_S = 40.0
LEAST_LIFE_S = 90.0
"""A process that lived shorter says nothing about growth."""
MEMORY_BYTES, MEMORY_SHARE = 48e6, 0.25
COUNT, COUNT_SHARE = 12.0, 0.25
"""What may be added between the first and the last third of a life: so much, and so much of what there was."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process."""

    at_s: float
    memory_bytes: int
    files: int
    threads: int


class Meter:
    """Looks from its making until `close`, in a thread of its own."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._lives: dict[tuple[str, int, float], list[Sample]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-meter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def growth(self) -> list[Growth]:
        """Of every process that lived long enough, the longest life first."""
        lives = [(place, pid, samples) for (place, pid, _), samples in self._lives.items()]
        found = [growth_of(place, pid, samples) for place, pid, samples in lives]
        return sorted((each for each in found if each is not None), key=lambda each: -each.life_s)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            for place in self._lab.network.places:
                with contextlib.suppress(psutil.Error, OSError):
                    self._look(place)

    def _look(self, place: str) -> None:
        process = self._lab.process(place)
        if process is None:
            return
        with process.oneshot():
            line = process.cmdline()
            if "ciuic.cli.main" not in line:  # it is just becoming the hub or the agent
                return
            key = (place, process.pid, process.create_time())
            sample = Sample(time.monotonic(), process.memory_info().rss, process.num_fds(), process.num_threads())
        self._lives.setdefault(key, []).append(sample)


def growth_of(place: str, pid: int, samples: list[Sample]) -> Growth | None:
    """Medians of the first and the last third of a life after the warm-up; None when it was too short."""
    if not samples or samples[-1].at_s - samples[0].at_s < LEAST_LIFE_S:
        return None
    warm = [sample for sample in samples if sample.at_s - samples[0].at_s >= WARM_UP_S]
    third = len(warm) // 3
    if third < 3:
        return None
    first, last = warm[:third], warm[-third:]

    def medians(name: str) -> tuple[float, float]:
        return (
            float(statistics.median(getattr(sample, name) for sample in first)),
            float(statistics.median(getattr(sample, name) for sample in last)),
        )

    return Growth(
        place=place,
        pid=pid,
        life_s=round(samples[-1].at_s - samples[0].at_s, 1),
        memory_bytes=medians("memory_bytes"),
        files=medians("files"),
        threads=medians("threads"),
    )


def leaks(growth: Growth) -> list[str]:
    """What has grown by more than may be, in words."""
    found = []
    bounds = (
        ("memory_bytes", MEMORY_BYTES, MEMORY_SHARE),
        ("files", COUNT, COUNT_SHARE),
        ("threads", COUNT, COUNT_SHARE),
    )
    for name, absolute, share in bounds:
        before, after = getattr(growth, name)
        if after - before > absolute + share * before:
            found.append(
                f"{name} of {growth.place} ({growth.pid}): {before:.0f} -> {after:.0f} in {growth.life_s:.0f} s"
            )
    return found

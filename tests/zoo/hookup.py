"""Where the zoo touches the doctor: one function for a rank, one class for the runner."""

import importlib.util
import threading
from pathlib import Path
from typing import Any

EVERY = 10
"""Steps from one sample to the next: the doctor's own default."""


def doctor_exists() -> bool:
    """Whether this installation has the doctor."""
    return importlib.util.find_spec("ciuic.doctor") is not None


def attach_rank(doctor: dict[str, Any], rank: int, world: int) -> None:
    """Let the doctor look at this process; before the program's first line."""
    from ciuic.doctor.probe.attach import attach

    attach(tuple(doctor["address"]), doctor["token"], rank=rank, world=world, every=EVERY)


class Desk:
    """The doctor's side that collects what the ranks report during one start of a program."""

    def __init__(self, folder: Path) -> None:
        from ciuic.doctor.collector import Collector, Options

        self.found = threading.Event()
        """Set when the doctor has told its first incident that is more than a note."""
        self._collector = Collector(Options(folder=folder, every=EVERY), told=self._hear)
        self._collector.start()

    def _hear(self, incident: Any) -> None:
        from ciuic.doctor.finding import Severity
        from ciuic.doctor.incidents import severity_of

        if severity_of(incident.cause) is not Severity.NOTE:
            self.found.set()

    def for_ranks(self) -> dict[str, Any]:
        """What `attach_rank` needs."""
        return {"address": self._collector.address, "token": self._collector.token}

    def incidents(self) -> list[dict[str, Any]]:
        """What was found so far as plain data, the most likely cause first."""
        import msgspec

        return [msgspec.to_builtins(incident) for incident in self._collector.incidents()]

    def close(self) -> list[dict[str, Any]]:
        """Let the doctor come to its end; all that it found."""
        self._collector.close()
        return self.incidents()

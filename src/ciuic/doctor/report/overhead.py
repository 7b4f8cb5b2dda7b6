"""What the doctor has cost a run that it looked at: from what its own records say."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ciuic.doctor.evidence import EVIDENCE, read_evidence
from ciuic.doctor.record import Record, to_frame
from ciuic.doctor.sampling import COST, STEP_TIME
from ciuic.errors import NotFoundError


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Of one rank, over the steps of its first optimizer between its first and its last record."""

    rank: int
    steps: int
    """Between the first record and the last one."""
    looked_at: int
    """Of them, those that were looked at closely."""
    step_s: float
    """Mean wall time of a step."""
    cost_s: float
    """Processor time of the doctor's code in the program's own threads, over all these steps."""
    bytes_per_check: int
    """Of the largest record, at most: digests count as text."""

    @property
    def share(self) -> float:
        """Of the steps' time."""
        return self.cost_s / (self.steps * self.step_s) if self.steps and self.step_s > 0 else 0.0


def overheads(folder: Path) -> list[Overhead]:
    """One for each rank that has sent two records. Raises NotFoundError when the folder is not a doctor's."""
    if not (folder / EVIDENCE).is_file():
        raise NotFoundError(
            f"{folder} has no evidence of the doctor",
            cause=f"there is no {EVIDENCE} in it",
            next="give the folder that `ciuic doctor run` named",
        )
    by_rank: dict[int, list[Record]] = {}
    for record in _records(read_evidence(folder)):
        by_rank.setdefault(record.rank, []).append(record)
    return [_of(rank, records) for rank, records in sorted(by_rank.items()) if len(records) > 1]


def _records(lines: Iterable[tuple[str, Any]]) -> Iterable[Record]:
    for kind, message in lines:
        if kind == "record" and message[2] == 0:
            _, rank, optimizer, step, time_s, facts = message
            yield Record(rank=rank, optimizer=optimizer, step=step, time_s=time_s, facts=facts)


def _of(rank: int, records: list[Record]) -> Overhead:
    """The first record's own cost has the start of the program in it, and counts for no step."""
    steps, wall_s, cost_s = 0, 0.0, 0.0
    for before, record in pairwise(records):
        count = max(0, record.step - before.step)
        steps += count
        wall_s += count * float(record.facts.get(STEP_TIME, 0.0))
        cost_s += float(record.facts.get(COST, 0.0))
    return Overhead(
        rank=rank,
        steps=steps,
        looked_at=len(records) - 1,
        step_s=wall_s / steps if steps else 0.0,
        cost_s=cost_s,
        bytes_per_check=max(len(to_frame(record)) for record in records),
    )

"""Are the losses of ranks alike up to chance?"""

import math
import statistics
from collections.abc import Iterable, Sequence

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts_training import LOSS
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.rules.gathered import ranks_text

SAMPLES = 8
"""In a row, in which the same rank must be the farthest, on the same side."""
FAR, APART = 3.0, 1.7
"""Ratio on average for a warning, and for a note."""
LEAST = 1.2
"""Ratio in each of the samples."""
SAMPLES_ZERO = 4
"""In a row, in which the losses of the same ranks are exactly zero."""


class Losses(Rule):
    """E6."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, ...], list[tuple[int, float, float, float]]] = {}
        """By ranks: the farthest rank, its log ratio, its loss and the middle of the others."""
        self._told: set[tuple[tuple[int, ...], Severity]] = set()
        self._zero: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        """By ranks: those whose loss was exactly zero, and in how many samples in a row."""

    def round(self, case: Case, round: Round) -> Iterable[Finding]:
        """Of the first optimizer."""
        if round.optimizer:
            return
        for ranks in round.groups():
            yield from self._compare(round, ranks)
            yield from self._nothing(round, ranks)

    def _nothing(self, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        losses = {rank: float(round_.records[rank].facts.get(LOSS, math.nan)) for rank in ranks}
        zero = tuple(rank for rank in ranks if losses[rank] == 0)
        others = [loss for rank, loss in losses.items() if rank not in zero]
        before, count = self._zero.get(tuple(ranks), ((), 0))
        count = count + 1 if zero == before else 1
        self._zero[tuple(ranks)] = zero, count
        if count != SAMPLES_ZERO or not zero or not others or not all(0 < abs(loss) < math.inf for loss in others):
            return
        yield Finding(
            code="CIUIC-E6",
            cause=f"the loss of {ranks_text(zero)} is exactly 0 in {count} samples in a row, "
            f"{others[0]:.3g} elsewhere: none of its labels counts, and "
            "the mean of the gradients is that much too small",
            step=max(1, round_.step),
            ranks=zero,
            evidence={"loss": 0.0, "others": others[0]},
            confidence=0.85,
            fix="look at this rank's labels or mask: all of them may be ignored",
        )

    def _compare(self, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        losses = {rank: float(round_.records[rank].facts.get(LOSS, math.nan)) for rank in ranks}
        rows = self._rows.setdefault(tuple(ranks), [])
        if not all(0 < loss < math.inf for loss in losses.values()):
            rows.clear()
            return
        row = _farthest(losses)
        if row is None or abs(row[1]) < math.log(LEAST) or (rows and not _goes_on(rows[-1], row)):
            rows.clear()
        if row is None or abs(row[1]) < math.log(LEAST):
            return
        rows.append(row)
        del rows[:-SAMPLES]
        if len(rows) < SAMPLES:
            return
        ratio = math.exp(abs(statistics.fmean(row[1] for row in rows)))
        severity = Severity.WARNING if ratio >= FAR else Severity.NOTE
        if ratio < APART or (tuple(ranks), severity) in self._told:
            return
        self._told.add((tuple(ranks), severity))
        rank, _, loss, others = row
        yield Finding(
            code="CIUIC-E6",
            cause=f"the loss of rank {rank} stays far from the others': {loss:.3g} where they have {others:.3g}, "
            f"in {len(rows)} samples in a row",
            step=max(1, round_.step),
            ranks=(rank,),
            evidence={"ratio": round(ratio, 3), "loss": loss, "others": others},
            confidence=0.7 if severity is Severity.WARNING else 0.4,
            severity=severity,
        )


def _farthest(losses: dict[int, float]) -> tuple[int, float, float, float] | None:
    """Of two ranks the one with the larger loss."""
    if len(losses) == 2:
        (low, small), (high, large) = sorted(losses.items(), key=lambda item: item[1])
        return (high, math.log(large / small), large, small) if low != high else None
    found = []
    for rank, loss in losses.items():
        middle = statistics.median(other for at, other in losses.items() if at != rank)
        found.append((rank, math.log(loss / middle), loss, middle))
    return max(found, key=lambda row: abs(row[1]))


def _goes_on(before: tuple[int, float, float, float], row: tuple[int, float, float, float]) -> bool:
    return before[0] == row[0] and (before[1] > 0) == (row[1] > 0)

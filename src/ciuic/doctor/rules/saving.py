"""Saves that hold the training loop up."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ciuic.doctor.case import Case, Rule
from ciuic.doctor.facts_waiting import SAVES, STEP_USUAL, STILL, WAITS
from ciuic.doctor.finding import Finding, Revised, Severity
from ciuic.doctor.record import Beat

LEAST_S = 1.0
TIMES_STEP = 20.0
"""A save counts when it takes so long and so many steps."""
SHARE = 0.05
"""Of the run's time so far: below it a save is worth no more than a note."""
FRESH_S = 1.5


@dataclass(kw_only=True)
class _Save:
    took_s: float
    step: int
    place: str
    waiting: int


class Saving(Rule):
    """L4."""

    def __init__(self) -> None:
        self._now: dict[int, _Save] = {}
        self._total_s = 0.0
        self._times = 0
        self._first_s: float | None = None
        self._finding: Finding | None = None

    def beat(self, case: Case, beat: Beat) -> Iterable[Finding | Revised]:
        if self._first_s is None and beat.step > 0:
            self._first_s = time.monotonic()
        rank, known = beat.rank, self._now.get(beat.rank)
        if known is not None and (not beat.facts.get(SAVES) or beat.phase_s < known.took_s):
            del self._now[rank]
            self._total_s += known.took_s if known.waiting >= 0 else 0.0
        if not beat.facts.get(SAVES) or beat.step < 1:
            return
        waiting = self._waiting(case, rank)
        place = beat.facts.get(STILL, [""])[0]
        new = known is None or beat.phase_s < known.took_s
        self._now[rank] = now = _Save(took_s=beat.phase_s, step=beat.step, place=place, waiting=waiting)
        usual_s = beat.facts.get(STEP_USUAL, 0.0)
        if waiting < 0 or beat.phase_s < max(LEAST_S, TIMES_STEP * usual_s):
            return
        self._times += new or self._times == 0
        yield Revised(finding=self._found(rank, now, usual_s))

    def _waiting(self, case: Case, rank: int) -> int:
        """Ranks that wait meanwhile; -1: the others go on."""
        now_s = time.monotonic()
        others = [each for other, each in case.beats.items() if other != rank and other not in case.gone]
        fresh = [each for each in others if now_s - case.heard_s.get(each.rank, 0.0) < FRESH_S]
        held = [each for each in fresh if each.facts.get(WAITS) or each.facts.get(SAVES)]
        return len(held) if len(held) == len(fresh) else -1

    def end(self, case: Case) -> Iterable[Finding | Revised]:
        if self._finding is not None and self._share() < SHARE:
            yield Revised(finding=_noted(self._finding))

    def _share(self) -> float:
        elapsed_s = time.monotonic() - (self._first_s or 0.0)
        held_s = self._total_s + max((each.took_s for each in self._now.values() if each.waiting >= 0), default=0.0)
        return held_s / elapsed_s if self._first_s is not None and elapsed_s > 0 else 1.0

    def _found(self, rank: int, save: _Save, usual_s: float) -> Finding:
        share = self._share()
        others = "the other rank waits" if save.waiting == 1 else f"{save.waiting} other ranks wait"
        others = others if save.waiting else "training stands still"
        steps = f", as long as {save.took_s / usual_s:.0f} steps" if usual_s > 0 else ""
        self._finding = Finding(
            code="CIUIC-L4",
            cause=f"rank {rank} saves for {save.took_s:.1f} s{steps}, at {save.place}; {others}",
            step=save.step + 1,
            ranks=(rank,),
            evidence={"phase": "save", "save_s": round(save.took_s, 1), "share_of_time": round(min(share, 1.0), 3)},
            confidence=0.85,
            severity=Severity.WARNING if share >= SHARE else Severity.NOTE,
        )
        return self._finding


def _noted(finding: Finding) -> Finding:
    return Finding(
        code=finding.code,
        cause=finding.cause,
        step=finding.step,
        ranks=finding.ranks,
        evidence=finding.evidence,
        confidence=finding.confidence,
        severity=Severity.NOTE,
    )

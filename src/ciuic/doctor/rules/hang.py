"""Who keeps the others waiting: a rank that does something else, is stopped, or nobody. Slow is not dead."""

import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ciuic.doctor.case import Asked, Case, Rule
from ciuic.doctor.environment import HANG_S
from ciuic.doctor.facts_waiting import HISTORY, LATE, OPEN, PENDING, STEP_USUAL, STILL, UNEVEN, WAITS
from ciuic.doctor.finding import Blind, Finding, Revised, Severity
from ciuic.doctor.record import Beat
from ciuic.doctor.rules.calls import judge
from ciuic.doctor.rules.waits import SLOW, all_wait, changed, failed, slow, standing, stopped

LEAST_S = 3.0
TIMES_USUAL = 10.0
"""A wait is judged when it has taken so many usual steps, and at least LEAST_S."""
FIRST_STEP_TIMES = 3.0
"""Before any step is done the limit is so many times LEAST_S: models are compiled, workers start."""
SILENT_S = 2.0
PAUSED_S = 1.5
"""The collector itself stood still for so long: nothing is judged until new beats have come."""
PLACES_MAX = 64
"""A loop that is seen at more lines than these is not told from work."""
COMES_BACK = ("CIUIC-J3", "CIUIC-J6", "CIUIC-J7")


@dataclass(kw_only=True)
class _Wait:
    """What is known of the present wait."""

    finding: Finding
    longest_s: float


@dataclass(kw_only=True)
class _Places:
    """Lines at which a rank was seen since its phase began: new ones mean progress."""

    phase_s: float
    seen: set[str]
    new_s: float
    """Time in the phase when the last new one came."""


class Hang(Rule):
    """J3, J6, J7; J2 where everybody waits for another call."""

    def __init__(self, least_s: float | None = None) -> None:
        given = os.environ.get(HANG_S, "")
        is_number = given.replace(".", "", 1).isdigit() and float(given) > 0
        self._least_s = least_s or (float(given) if is_number else LEAST_S)
        self._ticked_s: float | None = None
        self._blind_until_s = 0.0
        self._wait: _Wait | None = None
        self._asked_step = -1
        self._places: dict[int, _Places] = {}

    def beat(self, case: Case, beat: Beat) -> Iterable[Finding]:
        place = beat.facts.get(STILL, [""])[0]
        known = self._places.get(beat.rank)
        if known is None or beat.phase_s < known.phase_s:
            known = self._places[beat.rank] = _Places(phase_s=0.0, seen=set(), new_s=0.0)
        known.phase_s = beat.phase_s
        if place and place not in known.seen and len(known.seen) < PLACES_MAX:
            if known.seen:
                known.new_s = beat.phase_s
            known.seen.add(place)
        return ()

    def tick(self, case: Case, now_s: float) -> Iterable[Finding | Revised]:
        if self._ticked_s is not None and now_s - self._ticked_s > PAUSED_S:
            self._blind_until_s = now_s + PAUSED_S
        self._ticked_s = now_s
        if now_s < self._blind_until_s or case.world < 2:
            return
        limit_s = self.limit_s(case)
        fresh = {
            r: b for r, b in case.beats.items() if r not in case.gone and now_s - case.heard_s.get(r, 0.0) < SILENT_S
        }
        waiting = {r: b for r, b in fresh.items() if b.facts.get(WAITS) and b.phase_s >= limit_s}
        if not waiting:
            if fresh and not any(b.facts.get(WAITS) and b.phase_s >= SILENT_S for b in fresh.values()):
                yield from self._over()
            return
        longest_s = max(beat.phase_s for beat in waiting.values())
        found = self._judge(case, now_s, waiting, limit_s)
        if found is None:
            return
        known = self._wait
        if known is None or known.finding.key != found.key or known.finding.severity != found.severity:
            yield Revised(finding=found)
            self._wait = _Wait(finding=found, longest_s=longest_s)
        else:
            known.longest_s = longest_s

    def limit_s(self, case: Case) -> float:
        """From which time of waiting on somebody is looked for."""
        usual = [beat.facts[STEP_USUAL] for beat in case.beats.values() if beat.facts.get(STEP_USUAL)]
        if not usual:
            return FIRST_STEP_TIMES * self._least_s
        return max(self._least_s, TIMES_USUAL * statistics.median(usual))

    def left(self, case: Case, rank: int, how: str) -> Iterable[Finding | Revised]:
        if case.is_ended:
            return
        yield from self._failed(case)

    def end(self, case: Case) -> Iterable[Finding | Revised]:
        yield from self._failed(case)
        if self._wait is not None and case.gone and not case.present():
            yield from self._over()

    def _failed(self, case: Case) -> Iterable[Revised]:
        """A wait that ends with the end of a rank was a hang."""
        wait = self._wait
        if wait is None or not any(failed(case, rank) for rank in case.gone):
            return
        self._wait = None
        if wait.finding.code in COMES_BACK and wait.finding.severity is not Severity.CRITICAL:
            yield Revised(finding=changed(wait.finding, wait.finding.cause, Severity.CRITICAL, wait.longest_s))

    def _over(self) -> Iterable[Revised]:
        """Who waited goes on: it was slow, not dead."""
        wait, self._wait = self._wait, None
        if wait is None or wait.finding.code not in COMES_BACK:
            return
        old = wait.finding
        cause = f"it was slow, not dead: {old.cause.replace(SLOW, '')}; after {wait.longest_s:.1f} s the run went on"
        yield Revised(finding=changed(old, cause, Severity.NOTE, wait.longest_s))

    def _judge(self, case: Case, now_s: float, waiting: dict[int, Beat], limit_s: float) -> Finding | None:
        if any(rank in case.gone for rank in case.hellos):
            return None  # see departures
        if len(case.hellos) < case.world:
            return None  # they may wait for a rank that is not watched
        if case.has("CIUIC-J2", "CIUIC-J4"):
            return None  # that is why they wait
        suspects = [rank for rank in self._members(case, waiting) if rank not in waiting]
        silent = [rank for rank in suspects if now_s - case.heard_s.get(rank, now_s) >= max(SILENT_S, 0.6 * limit_s)]
        if silent:
            return stopped(case, now_s, silent, waiting, limit_s)
        beats = {rank: case.beats[rank] for rank in suspects if rank in case.beats}
        also_wait = [rank for rank, beat in beats.items() if beat.facts.get(WAITS)]
        if beats and len(also_wait) == len(beats):
            return None  # their wait has just begun
        free = {rank: beat for rank, beat in beats.items() if rank not in also_wait}
        still = {
            rank: beat
            for rank, beat in free.items()
            if beat.facts.get(STILL) and beat.phase_s - self._places[rank].new_s >= 0.6 * limit_s
        }
        if still:
            return standing(still, waiting, limit_s)
        if free:
            return slow(free, waiting, limit_s)
        if not suspects:
            self._ask(case, waiting)
        return None

    def _members(self, case: Case, waiting: dict[int, Beat]) -> list[int]:
        """Ranks that those who wait may wait for."""
        found: set[int] = set()
        for beat in waiting.values():
            opened = beat.facts.get(OPEN)
            found |= set(opened["ranks"]) if opened and opened["ranks"] else set(case.hellos)
        known = found & set(case.hellos)
        return sorted(known) if known - set(waiting) else case.present()

    def _ask(self, case: Case, waiting: dict[int, Beat]) -> None:
        step = max(beat.step for beat in waiting.values())
        if self._asked_step == step:
            return
        self._asked_step = step
        opened = next((beat.facts[OPEN] for beat in waiting.values() if beat.facts.get(OPEN)), None)
        groups = [name for beat in waiting.values() for name in beat.facts.get(PENDING, {})]
        group = opened["group"] if opened else next(iter(groups), "0")
        case.ask(self, HISTORY, sorted(waiting), facts={"group": group}, about=dict(waiting))

    def answered(self, case: Case, asked: Asked) -> Iterable[Finding | Blind | Revised]:
        waiting: dict[int, Beat] = asked.about
        compared = not any(beat.facts.get(LATE) or beat.facts.get(UNEVEN) for beat in waiting.values())
        found = judge(asked.answers) if compared else None
        if found is None:
            found = all_wait(waiting, asked)
        if self._wait is None or self._wait.finding.key != found.key:
            self._wait = _Wait(finding=found, longest_s=max(beat.phase_s for beat in waiting.values()))
            yield found

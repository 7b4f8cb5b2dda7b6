"""Who keeps the others waiting: a rank that does something else, is stopped, or nobody. Slow is not dead."""

import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ciuic.doctor.case import Asked, Case, Rule
from ciuic.doctor.facts import LEFT_IN
from ciuic.doctor.facts_waiting import CPU, HISTORY, LATE, OPEN, PENDING, STEP_USUAL, STILL, UNEVEN, WAITS
from ciuic.doctor.finding import Blind, Finding, Revised, Severity
from ciuic.doctor.record import Beat
from ciuic.doctor.rules.calls import judge
from ciuic.doctor.rules.sequences import name_of, steps_differ

HANG_S = "CIUIC_DOCTOR_HANG_S"
"""Environment: seconds of waiting from which on it may be a hang, at least."""
LEAST_S = 3.0
TIMES_USUAL = 10.0
"""A wait is judged when it has taken so many usual steps, and at least LEAST_S."""
FIRST_STEP_TIMES = 3.0
"""Before any step is done the limit is so many times LEAST_S: models are compiled, workers start."""
STOPPED_TIMES = 4.0
"""A rank that has given no sign of life for so many limits is taken for dead."""
LONG_TIMES = 8.0
"""After so many limits of waiting a rank that makes progress is worth a warning, and one that stands still is dead."""
SILENT_S = 2.0
PAUSED_S = 1.5
"""The collector itself stood still for so long: nothing is judged until new beats have come."""
PLACES_MAX = 64
"""A loop that is seen at more lines than these is not told from work."""
SLOW = "is slow, not dead: it "
COMPUTES = 0.05
"""Share of a processor from which on a rank computes, even on a machine that is too busy: who sleeps takes a tenth of it."""
POINT_TO_POINT = ("send", "recv")
COMES_BACK = ("CIUIC-J3", "CIUIC-J6", "CIUIC-J7")
PHASES = {
    "other": "own code",
    "data": "data loader",
    "forward": "forward pass",
    "backward": "backward pass",
    "step": "optimizer's step",
}
SLOW_PHASES = {"save": "saves", "load": "loads", "start": "has not begun to train"}


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
        self._least_s = least_s or (
            float(given) if given.replace(".", "", 1).isdigit() and float(given) > 0 else LEAST_S
        )
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
            yield Revised(finding=_changed(wait.finding, wait.finding.cause, Severity.CRITICAL, wait.longest_s))

    def _over(self) -> Iterable[Revised]:
        """Who waited goes on: it was slow, not dead."""
        wait, self._wait = self._wait, None
        if wait is None or wait.finding.code not in COMES_BACK:
            return
        old = wait.finding
        cause = f"it was slow, not dead: {old.cause.replace(SLOW, '')}; after {wait.longest_s:.1f} s the run went on"
        yield Revised(finding=_changed(old, cause, Severity.NOTE, wait.longest_s))

    def _judge(self, case: Case, now_s: float, waiting: dict[int, Beat], limit_s: float) -> Finding | None:
        if any(rank in case.gone for rank in case.hellos):
            return None  # see departures
        if case.has("CIUIC-J2", "CIUIC-J4"):
            return None  # that is why they wait
        suspects = [rank for rank in self._members(case, waiting) if rank not in waiting]
        silent = [rank for rank in suspects if now_s - case.heard_s.get(rank, now_s) >= max(SILENT_S, 0.6 * limit_s)]
        if silent:
            return _stopped(case, now_s, silent, waiting, limit_s)
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
            return _still(still, waiting, limit_s)
        if free:
            return _slow(free, waiting, limit_s)
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
            found = _all_wait(waiting, asked)
        if self._wait is None or self._wait.finding.key != found.key:
            self._wait = _Wait(finding=found, longest_s=max(beat.phase_s for beat in waiting.values()))
            yield found


def _changed(old: Finding, cause: str, severity: Severity, waited_s: float) -> Finding:
    return Finding(
        code=old.code,
        cause=cause,
        step=old.step,
        ranks=old.ranks,
        evidence={**old.evidence, "waited_s": round(waited_s, 1)},
        confidence=old.confidence,
        severity=severity,
    )


def failed(case: Case, rank: int) -> bool:
    """Whether a rank that has left did not end in order."""
    bye = case.byes.get(rank)
    return bye is None or bye.how != "end" or bye.facts.get(LEFT_IN) in ("collective", "backward", "forward")


def _who_waits(waiting: dict[int, Beat]) -> str:
    rank, beat = max(waiting.items(), key=lambda item: item[1].phase_s)
    more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
    return f"rank {rank}{more} waits in {doing(beat)} for {beat.phase_s:.1f} s"


def doing(beat: Beat) -> str:
    """`all_reduce (call 12) at train.py:10 in main`, or the phase and the program's frame."""
    opened = beat.facts.get(OPEN)
    if opened:
        number = f" (call {opened['number']}{_of(opened['group'])})" if opened["number"] else ""
        return f"{name_of(opened['name'])}{number} at {opened['site']}"
    still = beat.facts.get(STILL)
    return f"{beat.phase} at {still[0]}" if still else beat.phase


def _of(group: str) -> str:
    return "" if group in ("", "0") else f" of group {group}"


def _stopped(case: Case, now_s: float, silent: list[int], waiting: dict[int, Beat], limit_s: float) -> Finding:
    rank = silent[0]
    quiet_s = now_s - case.heard_s[rank]
    last = case.beats.get(rank)
    dead = quiet_s >= STOPPED_TIMES * limit_s
    did = f"; last seen in {doing(last)}" if last is not None else ""
    return Finding(
        code="CIUIC-J6",
        cause=f"rank {rank} gives no sign of life, though its connection is open: stopped, swapped out, or its host is frozen{did}; {_who_waits(waiting)}",
        step=max(last.step if last is not None else 0, min(beat.step for beat in waiting.values())) + 1,
        ranks=tuple(silent),
        evidence={"silent_s": round(quiet_s, 1)},
        confidence=0.9,
        severity=Severity.CRITICAL if dead else Severity.WARNING,
    )


def _still(still: dict[int, Beat], waiting: dict[int, Beat], limit_s: float) -> Finding:
    rank, beat = max(still.items(), key=lambda item: item[1].phase_s)
    share = beat.facts.get(CPU)
    longest_s = max(each.phase_s for each in waiting.values())
    if beat.phase in SLOW_PHASES:
        what = f"rank {rank} {SLOW_PHASES[beat.phase]} for {beat.phase_s:.1f} s, slow or stuck"
        severity = Severity.WARNING if longest_s >= LONG_TIMES * limit_s else Severity.NOTE
    else:
        how = (
            "" if share is None else " and computes" if share > COMPUTES else " and sleeps or waits for something else"
        )
        what = f"rank {rank} makes no call{how}: in its {PHASES.get(beat.phase, beat.phase)} for {beat.phase_s:.1f} s"
        severity = Severity.CRITICAL if longest_s >= LONG_TIMES * limit_s else Severity.WARNING
    frames = beat.facts[STILL]
    evidence: dict[str, float | int | str] = {"still_s": round(beat.phase_s, 1), "stack": " < ".join(frames)[:300]}
    if share is not None:
        evidence["processor_share"] = share
    return Finding(
        code="CIUIC-J3",
        cause=f"{what}, at {frames[0]}; {_who_waits(waiting)}",
        step=beat.step + 1,
        ranks=tuple(sorted(still)),
        evidence=evidence,
        confidence=0.9,
        severity=severity,
    )


def _slow(free: dict[int, Beat], waiting: dict[int, Beat], limit_s: float) -> Finding:
    rank, beat = min(free.items(), key=lambda item: item[1].step)
    longest_s = max(each.phase_s for each in waiting.values())
    return Finding(
        code="CIUIC-J3",
        cause=f"rank {rank} {SLOW}works ({PHASES.get(beat.phase, beat.phase)}, step {beat.step + 1}) and has not come to the call; {_who_waits(waiting)}",
        step=beat.step + 1,
        ranks=(rank,),
        evidence={"waited_s": round(longest_s, 1)},
        confidence=0.6,
        severity=Severity.WARNING if longest_s >= LONG_TIMES * limit_s else Severity.NOTE,
    )


def _all_wait(waiting: dict[int, Beat], asked: Asked) -> Finding:
    at = {rank: doing(beat) for rank, beat in sorted(waiting.items())}
    step = min(beat.step for beat in waiting.values()) + 1
    evidence: dict[str, float | int | str] = {f"rank_{rank}": text for rank, text in list(at.items())[:8]}
    opened = [beat.facts.get(OPEN) for beat in waiting.values()]
    calls = {(each["group"], each["name"], each["number"]) for each in opened if each}
    told = "; ".join(f"rank {rank} in {text}" for rank, text in list(at.items())[:4])
    if opened and all(each and each["name"] in POINT_TO_POINT for each in opened):
        cause = f"all ranks wait for each other in sends and receives, and nobody does the other half: {told}"
        return Finding(code="CIUIC-J2", cause=cause, step=step, evidence=evidence, confidence=0.8)
    early = steps_differ({rank: facts.get("calls", []) for rank, facts in asked.answers.items()})
    if early is not None:
        number, rows = early
        steps = ", ".join(f"rank {rank} in step {row[4] + 1}" for rank, row in sorted(rows.items())[:4])
        cause = f"ranks make the calls of a group at different times: call {number} by {steps}; now all wait: {told}"
        return Finding(code="CIUIC-J2", cause=cause, step=step, evidence=evidence, confidence=0.8)
    if len(calls) > 1:
        cause = f"all ranks wait, each for another call: {told}"
        return Finding(code="CIUIC-J2", cause=cause, step=step, evidence=evidence, confidence=0.7)
    cause = (
        f"all ranks are in the same call and it does not end: {told}; a connection between them is broken or very slow"
    )
    return Finding(
        code="CIUIC-J7", cause=cause, step=step, evidence=evidence, confidence=0.7, severity=Severity.WARNING
    )

"""What is said of a wait: from the newest signs of life of those who wait and of those they wait for."""

from ciuic.doctor.case import Asked, Case
from ciuic.doctor.facts import LEFT_IN
from ciuic.doctor.facts_waiting import CPU, OPEN, STILL
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Beat
from ciuic.doctor.rules.sequences import name_of, steps_differ

STOPPED_TIMES = 4.0
"""A rank that has given no sign of life for so many limits is taken for dead."""
LONG_TIMES = 8.0
"""After so many limits of waiting a rank that makes progress is worth a warning, and one that stands still is dead."""
SLOW = "is slow, not dead: it "
COMPUTES = 0.05
"""Share of a processor from which on a rank computes, also on a machine that is too busy; sleeping takes far less."""
POINT_TO_POINT = ("send", "recv")
PHASES = {
    "other": "own code",
    "data": "data loader",
    "forward": "forward pass",
    "backward": "backward pass",
    "step": "optimizer's step",
}
SLOW_PHASES = {"save": "saves", "load": "loads", "start": "has not begun to train"}


def changed(old: Finding, cause: str, severity: Severity, waited_s: float) -> Finding:
    """The same finding with another sentence and severity, and how long was waited."""
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


def who_waits(waiting: dict[int, Beat]) -> str:
    """`rank 0 and 2 more wait in all_reduce (call 12) at train.py:10 in main for 3.1 s`."""
    rank, beat = max(waiting.items(), key=lambda item: item[1].phase_s)
    who = f"rank {rank} and {len(waiting) - 1} more wait" if len(waiting) > 1 else f"rank {rank} waits"
    return f"{who} in {doing(beat)} for {beat.phase_s:.1f} s"


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


def stopped(case: Case, now_s: float, silent: list[int], waiting: dict[int, Beat], limit_s: float) -> Finding:
    """J6: no sign of life."""
    rank = silent[0]
    quiet_s = now_s - case.heard_s[rank]
    last = case.beats.get(rank)
    dead = quiet_s >= STOPPED_TIMES * limit_s
    did = f"; last seen in {doing(last)}" if last is not None else ""
    return Finding(
        code="CIUIC-J6",
        cause=f"rank {rank} gives no sign of life, though its connection is open: stopped, swapped out, or its host is "
        f"frozen{did}; {who_waits(waiting)}",
        step=max(last.step if last is not None else 0, min(beat.step for beat in waiting.values())) + 1,
        ranks=tuple(silent),
        evidence={"silent_s": round(quiet_s, 1)},
        confidence=0.9,
        severity=Severity.CRITICAL if dead else Severity.WARNING,
    )


def standing(still: dict[int, Beat], waiting: dict[int, Beat], limit_s: float) -> Finding:
    """J3: ranks that have done the same for long."""
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
        works = share is not None and share > COMPUTES  # slow is not dead
        severity = Severity.CRITICAL if longest_s >= LONG_TIMES * limit_s and not works else Severity.WARNING
    frames = beat.facts[STILL]
    evidence: dict[str, float | int | str] = {"still_s": round(beat.phase_s, 1), "stack": " < ".join(frames)[:300]}
    if share is not None:
        evidence["processor_share"] = share
    return Finding(
        code="CIUIC-J3",
        cause=f"{what}, at {frames[0]}; {who_waits(waiting)}",
        step=beat.step + 1,
        ranks=tuple(sorted(still)),
        evidence=evidence,
        confidence=0.9,
        severity=severity,
    )


def slow(free: dict[int, Beat], waiting: dict[int, Beat], limit_s: float) -> Finding:
    """J3: a rank that works and has not come yet."""
    rank, beat = min(free.items(), key=lambda item: item[1].step)
    longest_s = max(each.phase_s for each in waiting.values())
    return Finding(
        code="CIUIC-J3",
        cause=f"rank {rank} {SLOW}works ({PHASES.get(beat.phase, beat.phase)}, step {beat.step + 1}) and has not come "
        f"to the call; {who_waits(waiting)}",
        step=beat.step + 1,
        ranks=(rank,),
        evidence={"waited_s": round(longest_s, 1)},
        confidence=0.6,
        severity=Severity.WARNING if longest_s >= LONG_TIMES * limit_s else Severity.NOTE,
    )


def all_wait(waiting: dict[int, Beat], asked: Asked) -> Finding:
    """J2 where they wait for different things, else J7."""
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

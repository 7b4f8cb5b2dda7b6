"""Ranks that left while others needed them: ended, failed, or gone without a word."""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ciuic.doctor.case import Case, Rule
from ciuic.doctor.facts import LEFT_IN
from ciuic.doctor.facts_waiting import OPEN, WAITS
from ciuic.doctor.finding import Finding
from ciuic.doctor.record import Hello
from ciuic.doctor.rules.sequences import name_of

CUT = "cut"
BACK_S = 2.5
"""A rank whose connection broke comes back within this time."""
TOGETHER_S = 1.0
"""Ranks that fail for one reason fail within this time."""
WAITED_S = 1.0
"""A rank that waits at least so long for one that has left waits for it."""
IN_A_CALL = ("collective", "backward")
_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|timed? ?out|broken pipe|Dist(Backend|Network|Store)Error|socket", re.IGNORECASE
)
_LIBRARY = re.compile(r"gloo|nccl|process group", re.IGNORECASE)
"""Named by errors of a call that broke, and by errors of many other things."""
_KINDS = re.compile(r"(RuntimeError|OSError|(Dist|Connection|BrokenPipe|Timeout)\w*)$")
"""Exceptions by which torch tells of a broken connection; a TypeError is the program's own."""


@dataclass(kw_only=True)
class Departure:
    """A rank that left."""

    rank: int
    how: str
    left_in: str
    """Phase in which it left; empty when it had no last words."""
    at_s: float
    """Of the collector's clock, monotonic."""
    step: int
    told: bool = False

    @property
    def is_cut(self) -> bool:
        """It had no last words."""
        return self.how == CUT

    @property
    def is_victim(self) -> bool:
        """It left out of a call, or because a connection broke: something else was the cause."""
        return not self.is_cut and (self.lost_connection or (self.how == "end" and self.left_in in IN_A_CALL))

    @property
    def lost_connection(self) -> bool:
        """It ended with an exception that tells of a connection."""
        if not _KINDS.search(self.kind):
            return False
        in_a_call = self.left_in in IN_A_CALL
        return bool(_CONNECTION.search(self.how) or (in_a_call and _LIBRARY.search(self.how)))

    @property
    def is_error(self) -> bool:
        """It ended with an exception of its own."""
        return (
            not self.is_cut
            and self.how != "end"
            and not self.is_victim
            and not self.how.startswith("KeyboardInterrupt")
        )

    @property
    def kind(self) -> str:
        """The exception's class."""
        return self.how.partition(":")[0]


class Departures(Rule):
    """J1 and J5, and J7 where connections broke and nobody is known to have left."""

    def __init__(self) -> None:
        self._left: dict[int, Departure] = {}

    def hello(self, case: Case, hello: Hello) -> Iterable[Finding]:
        self._left.pop(hello.rank, None)
        return ()

    def left(self, case: Case, rank: int, how: str) -> Iterable[Finding]:
        if case.is_ended:
            return ()
        bye, beat, latest = case.byes.get(rank), case.beats.get(rank), case.latest.get(rank)
        step = max(item.step for item in (bye, beat, latest) if item is not None) if bye or beat or latest else 0
        left_in = str(bye.facts.get(LEFT_IN, "")) if bye is not None else ""
        self._left[rank] = Departure(rank=rank, how=how, left_in=left_in, at_s=time.monotonic(), step=step)
        return ()

    def tick(self, case: Case, now_s: float) -> Iterable[Finding]:
        yield from self._judge(case, now_s, is_over=False)

    def end(self, case: Case) -> Iterable[Finding]:
        yield from self._judge(case, time.monotonic(), is_over=True)

    def _judge(self, case: Case, now_s: float, *, is_over: bool) -> Iterable[Finding]:
        if case.world < 2:
            return
        for gone in sorted(self._left.values(), key=lambda each: each.at_s):
            if gone.told or gone.is_victim:
                continue
            victims = self._victims(case, gone)
            age_s = now_s - gone.at_s
            found = self._of_one(case, gone, victims, age_s=age_s, is_over=is_over)
            if found is not None:
                gone.told = True
                yield found
                return  # who leaves later leaves because of the first
        yield from self._broken(case, now_s, is_over=is_over)

    def _of_one(
        self, case: Case, gone: Departure, victims: dict[int, str], *, age_s: float, is_over: bool
    ) -> Finding | None:
        if any(each.told for each in self._left.values()):
            return None
        if gone.is_cut:
            failed = any(rank in self._left for rank in victims)
            if victims and (is_over or age_s > BACK_S or (failed and age_s > 0.3)):
                return self._killed(case, gone, victims)
            if is_over and case.exit_code not in (None, 0):
                return self._killed(case, gone, victims)
            return None
        if gone.is_error:
            if age_s < TOGETHER_S and not is_over:
                return None
            others = [rank for rank in case.hellos if rank != gone.rank]
            alike = [r for r in others if r in self._left and self._left[r].kind == gone.kind]
            return None if len(alike) == len(others) else _ended(gone, victims)
        return _ended(gone, victims) if victims else None

    def _victims(self, case: Case, gone: Departure) -> dict[int, str]:
        """Ranks that wait for it, or failed after it left, and at what."""
        found = {}
        for rank, beat in sorted(case.beats.items()):
            if rank == gone.rank:
                continue
            left, bye = self._left.get(rank), case.byes.get(rank)
            call = bye.facts.get(OPEN) if bye is not None else beat.facts.get(OPEN)
            what = (
                f"{name_of(call['name'])} at {call['site']}"
                if call
                else f"its {bye.facts.get(LEFT_IN) if bye else beat.phase} phase"
            )
            if left is None:
                heard_s = case.heard_s.get(rank, 0.0)
                if beat.facts.get(WAITS) and beat.phase_s >= WAITED_S and heard_s > gone.at_s + WAITED_S:
                    found[rank] = what
            elif left.is_victim and left.at_s >= gone.at_s - 0.2:
                found[rank] = what
        return found

    def _killed(self, case: Case, gone: Departure, victims: dict[int, str]) -> Finding:
        others = _others(victims) if victims else "the run failed"
        steps = [case.byes[rank].step for rank in victims if rank in case.byes]
        step = max(gone.step, min(steps, default=0))  # its own last word may be half a second old
        return Finding(
            code="CIUIC-J5",
            cause=f"the process of rank {gone.rank} is gone without a word at step {step + 1}: killed, out of memory "
            f"or crashed; {others}",
            step=step + 1,
            ranks=(gone.rank,),
            evidence={"steps_done": step},
            confidence=0.9 if victims else 0.6,
        )

    def _broken(self, case: Case, now_s: float, *, is_over: bool) -> Iterable[Finding]:
        failed = [each for each in self._left.values() if each.is_victim and each.lost_connection]
        if not failed or any(not each.is_victim for each in self._left.values()) or any(each.told for each in failed):
            return
        first = min(failed, key=lambda each: each.at_s)
        if now_s - first.at_s < BACK_S and not is_over:
            return
        first.told = True
        yield Finding(
            code="CIUIC-J7",
            cause=f"rank {first.rank} ended at step {first.step + 1} because a connection to another rank failed, and "
            f"no rank is known to have left: {first.how}",
            step=first.step + 1,
            ranks=(),
            evidence={"error": first.how[:200]},
            confidence=0.6,
        )


def _ended(gone: Departure, victims: dict[int, str]) -> Finding:
    how = "ended" if gone.how == "end" else f"ended with {gone.how}"
    if gone.how == "end" and gone.left_in not in ("other", "start", ""):
        how = f"ended while in its {gone.left_in} phase"
    others = _others(victims) if victims else "the others go on without it"
    evidence: dict[str, float | int | str] = {"steps_done": gone.step}
    if gone.how != "end":
        evidence["error"] = gone.how[:200]
    return Finding(
        code="CIUIC-J1",
        cause=f"rank {gone.rank} {how} after {gone.step} steps; {others}",
        step=gone.step + 1,
        ranks=(gone.rank,),
        evidence=evidence,
        fix="look at this error first, its lines are in that rank's output: the others only wait for the rank"
        if gone.how != "end"
        else "",
        confidence=0.9 if victims else 0.75,
    )


def _others(victims: dict[int, str]) -> str:
    rank, what = next(iter(sorted(victims.items())))
    more = f" (and {len(victims) - 1} more)" if len(victims) > 1 else ""
    return f"rank {rank}{more} needs it in {what}"

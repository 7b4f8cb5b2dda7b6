"""Ranks that call different collectives, or the same one with different tensors: found before anybody waits long."""

import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ciuic.doctor.blackbox import read_and_remove
from ciuic.doctor.case import Asked, Case, Rule
from ciuic.doctor.facts_waiting import CALLS, HISTORY, LATE, NEW_CALL, UNEVEN
from ciuic.doctor.finding import Blind, Finding
from ciuic.doctor.record import Beat, Facts, Hello, Notice
from ciuic.doctor.rules.sequences import (
    OWN_CALLS,
    Difference,
    called,
    first_difference,
    is_same_call,
    recorded_difference,
    recorded_in_common,
)

MARKS_HELD = 256
NOTICES_HELD = 1024
ASKED_MAX = 4
"""Of one group: a rank that was too busy to answer is asked again."""
DYING_S = 5.0
SURE, LESS_SURE = 0.95, 0.8


@dataclass(eq=False, kw_only=True)
class _Group:
    marks: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By rank: digest of all calls up to a number."""
    asked: int = 0
    waiting: bool = False
    done: bool = False


class CallOrder(Rule):
    """J2 and J4."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._new: dict[tuple[str, int], dict[int, Facts]] = {}
        self._not_compared: set[int] = set()
        """Ranks whose numbers cannot be compared."""
        self._dying: dict[int, float] = {}
        """Ranks of this machine whose connection broke, and when: their processes may not have ended yet."""
        self._found: dict[str, dict[int, Facts]] = {}
        """By group and rank: calls that dead ranks left behind."""

    def hello(self, case: Case, hello: Hello) -> Iterable[Finding]:
        for group in self._groups.values():
            group.marks.pop(hello.rank, None)
        for known in self._new.values():
            known.pop(hello.rank, None)
        self._not_compared.discard(hello.rank)
        self._dying.pop(hello.rank, None)
        for found in self._found.values():
            found.pop(hello.rank, None)
        return ()

    def beat(self, case: Case, beat: Beat) -> Iterable[Finding]:
        return self._compare(case, beat.rank, beat.facts)

    def left(self, case: Case, rank: int, how: str) -> Iterable[Finding]:
        bye = case.byes.get(rank)
        if bye is not None:
            yield from self._compare(case, rank, bye.facts)
        elif rank in case.hellos and case.hellos[rank].host == socket.gethostname():
            self._dying[rank] = time.monotonic()
        yield from self._after_death(case)

    def tick(self, case: Case, now_s: float) -> Iterable[Finding]:
        if self._dying:
            yield from self._after_death(case)
        self._dying = {rank: at_s for rank, at_s in self._dying.items() if now_s - at_s < DYING_S}

    def end(self, case: Case) -> Iterable[Finding]:
        yield from self._after_death(case)

    def _left_behind(self, hello: Hello) -> None:
        """The last calls of a rank that had no last words, when its process has ended."""
        if process_lives(hello.pid):
            return
        del self._dying[hello.rank]
        for group, *row in read_and_remove(hello.pid):
            self._found.setdefault(group, {}).setdefault(hello.rank, {"calls": [], "recorder": []})["calls"].append(row)

    def _after_death(self, case: Case) -> Iterable[Finding]:
        """What a dead rank was about to do, against the last words of others and what they left behind."""
        for rank in list(self._dying):
            self._left_behind(case.hellos[rank])
        for name, found in self._found.items():
            group = self._groups.setdefault(name, _Group())
            if group.done or self._not_compared & found.keys():
                continue
            finding = judge(self._said(case, name, {}))
            if finding is not None:
                group.done = True
                yield finding
            elif not group.waiting and len(case.present()) > 0:
                self._ask(case, name, group)

    def _compare(self, case: Case, rank: int, facts: Facts) -> Iterable[Finding]:
        self._doubt(rank, facts)
        for name, marks in facts.get(CALLS, {}).items():
            group = self._groups.setdefault(name, _Group())
            own = group.marks.setdefault(rank, {})
            own.update({number: bytes(digest) for number, digest in marks})
            while len(own) > MARKS_HELD:
                own.pop(next(iter(own)))
            if group.done or not self._differs(group, rank):
                continue
            found = judge(self._said(case, name, {}))
            if found is not None:
                group.done = True
                yield found
            elif not group.waiting:
                self._ask(case, name, group)

    def _said(self, case: Case, name: str, answers: dict[int, Facts]) -> dict[int, Facts]:
        """Answers, the last words of ranks that could not answer any more, and what dead ones left behind."""
        words = {rank: bye.facts.get(HISTORY, {}).get(name) for rank, bye in case.byes.items()}
        said = (
            dict(self._found.get(name, {}))
            | {rank: facts for rank, facts in words.items() if facts}
            | {r: facts for r, facts in answers.items() if facts}
        )
        return {rank: facts for rank, facts in said.items() if rank not in self._not_compared}

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding]:
        if notice.kind != NEW_CALL:
            return
        self._doubt(notice.rank, notice.facts)
        facts = notice.facts
        if not facts["number"]:
            return  # point to point: the two ends make different calls
        known = self._new.setdefault((facts["group"], facts["number"]), {})
        known[notice.rank] = facts
        while len(self._new) > NOTICES_HELD:
            self._new.pop(next(iter(self._new)))
        compared = {rank: each for rank, each in known.items() if rank not in self._not_compared}
        if len({(each["name"], each["detail"]) for each in compared.values()}) < 2:
            return
        group = self._groups.setdefault(facts["group"], _Group())
        if not group.done and not group.waiting:
            self._ask(case, facts["group"], group)
        if not any(each["name"] in OWN_CALLS for each in compared.values()):
            rows = {r: [f["number"], f["name"], f["detail"], f["site"], f["step"]] for r, f in sorted(compared.items())}
            difference = Difference(number=facts["number"], calls=rows, odd=(), same_call=is_same_call(rows))
            yield finding_of(difference, confidence=LESS_SURE)

    def _doubt(self, rank: int, facts: Facts) -> None:
        if facts.get(LATE) or facts.get(UNEVEN):
            self._not_compared.add(rank)

    def _differs(self, group: _Group, rank: int) -> bool:
        if rank in self._not_compared:
            return False
        own = group.marks[rank]
        return any(
            own[number] != marks[number]
            for other, marks in group.marks.items()
            if other != rank and other not in self._not_compared
            for number in own.keys() & marks.keys()
        )

    def _ask(self, case: Case, name: str, group: _Group) -> None:
        if group.asked >= ASKED_MAX:
            group.done = True
            return
        group.asked, group.waiting = group.asked + 1, True
        ranks = [rank for rank in case.present() if rank not in self._not_compared]
        case.ask(self, HISTORY, ranks, facts={"group": name}, about=name)

    def answered(self, case: Case, asked: Asked) -> Iterable[Finding | Blind]:
        group = self._groups[asked.about]
        group.waiting = False
        found = judge(self._said(case, asked.about, asked.answers))
        if found is not None:
            group.done = True
            yield found


def process_lives(pid: int) -> bool:
    """Whether there is such a process here, one that has ended and was not waited for aside."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def judge(answers: dict[int, Facts]) -> Finding | None:
    """From the answers to HISTORY of at least two ranks: what differs first, or None."""
    difference = first_difference({rank: facts.get("calls", []) for rank, facts in answers.items()})
    recorded = {rank: facts.get("recorder", []) for rank, facts in answers.items() if facts.get("recorder")}
    in_recorder = recorded_difference(recorded)
    if difference is None:
        return _recorded_only(*in_recorder) if in_recorder is not None else None
    guessed = difference.by_ddp and not difference.meets_evaluation
    if guessed and in_recorder is None and recorded_in_common(recorded):
        return None  # DDP's own calls are guessed from its passes; torch itself has seen equal ones
    return finding_of(difference, confidence=SURE)


def finding_of(difference: Difference, *, confidence: float) -> Finding:
    """J2, or J4 where only the tensors differ."""
    told = "; ".join(f"rank {rank} {called(row[1], row[2], row[3])}" for rank, row in _few(difference))
    number = difference.number
    if difference.same_call and not difference.meets_evaluation:
        cause = f"call {number} of the group has other tensors on other ranks: {told}"
        code = "CIUIC-J4"
    else:
        cause = f"from call {number} of the group on, ranks make different calls: {told}"
        code = "CIUIC-J2"
    evidence: dict[str, float | int | str] = {"call": number}
    evidence |= {f"rank_{rank}": called(row[1], row[2], row[3]) for rank, row in _few(difference)}
    odd = difference.odd
    if odd:
        cause += (
            f"; rank {odd[0]} left its usual order" if len(odd) == 1 else f"; ranks {_list(odd)} left the usual order"
        )
    return Finding(code=code, cause=cause, step=difference.step, ranks=odd, evidence=evidence, confidence=confidence)


def _few(difference: Difference) -> list[tuple[int, Any]]:
    """At most four ranks, of each kind of call at least one."""
    rows = sorted(difference.calls.items())
    seen: set[tuple[str, str, str]] = set()
    chosen = []
    for rank, row in rows:
        if (row[1], row[2], row[3]) not in seen:
            seen.add((row[1], row[2], row[3]))
            chosen.append((rank, row))
    return chosen[:4]


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8]))


def _recorded_only(number: int, rows: dict[int, Any]) -> Finding:
    told = "; ".join(f"rank {rank} {row[1]} of {row[2]}" for rank, row in sorted(rows.items())[:4])
    same = len({row[1] for row in rows.values()}) == 1
    return Finding(
        code="CIUIC-J4" if same else "CIUIC-J2",
        cause=f"collective {number} of the group (torch's own count, DDP's included) differs between ranks: {told}",
        step=0,
        evidence={"collective": number},
        confidence=LESS_SURE,
    )

"""Class K: interfaces, clocks, and what the ranks must have in common before they begin."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from ciuic.doctor.case import Case, Rule, odd_ones
from ciuic.doctor.facts_launch import HOST, LAYOUT
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Beat, Hello, Notice
from ciuic.doctor.rules.gathered import Gathered, Together, ranks_text

CLOCK_S = 5.0
"""Clocks that are so far apart are no chance of a slow line."""
FAR_S, BEATS_FAR, BEATS = 30.0, 2, 6
"""A difference of FAR_S is told after BEATS_FAR signs of life of each rank, a smaller one after BEATS."""
VALUES_MAX = 6


class Launch(Rule):
    """K1, K2 and K3."""

    def __init__(self) -> None:
        self._notices = Gathered()
        self._offsets: dict[int, tuple[int, float]] = {}
        """By rank: signs of life, and the least that the collector's clock was ahead of the rank's when one came."""
        self._told: set[str] = set()

    def hello(self, case: Case, hello: Hello) -> Iterable[Finding]:
        """Do they agree on how many they are?"""
        worlds = {rank: each.world for rank, each in sorted(case.hellos.items())}
        if len(set(worlds.values())) > 1 and "world" not in self._told:
            self._told.add("world")
            yield _differs(
                "number of ranks",
                worlds,
                severity=None,
                fix="start all nodes with the same --nnodes and --nproc-per-node",
            )

    def beat(self, case: Case, beat: Beat) -> Iterable[Finding]:
        """Compare clocks."""
        yield from self._compare(beat.rank, beat.step, beat.time_s)

    def left(self, case: Case, rank: int, how: str) -> Iterable[Finding]:
        """The last sign of life of a rank that said bye; in a short program it is the second."""
        bye = case.byes.get(rank)
        if bye is not None and bye.time_s:
            yield from self._compare(rank, bye.step, bye.time_s)

    def _compare(self, rank: int, step: int, time_s: float) -> Iterator[Finding]:
        """What is on its way longer makes a clock look behind, never ahead; the least counts."""
        count, least = self._offsets.get(rank, (0, float("inf")))
        self._offsets[rank] = count + 1, min(least, time.time() - time_s)
        offsets = {rank: value for rank, (_, value) in sorted(self._offsets.items())}
        apart_s = max(offsets.values()) - min(offsets.values())
        if len(offsets) < 2 or apart_s < CLOCK_S or "clock" in self._told:
            return
        if min(count for count, _ in self._offsets.values()) < (BEATS_FAR if apart_s >= FAR_S else BEATS):
            return
        self._told.add("clock")
        odd = max(offsets, key=lambda rank: abs(offsets[rank] - _middle(offsets)))
        ahead_s = _middle(offsets) - offsets[odd]
        side = "ahead of" if ahead_s > 0 else "behind"
        yield Finding(
            code="CIUIC-K2",
            cause=f"the clock of rank {odd} is {abs(ahead_s):.0f} s {side} the others",
            step=max(1, step),
            ranks=(odd,),
            evidence={f"offset_s_rank_{rank}": round(-value, 3) for rank, value in list(offsets.items())[:8]},
            confidence=0.95,
        )

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding]:
        """Keep it; an interface that fails is told at once, by the first rank."""
        if notice.kind == HOST:
            self._notices.add((HOST,), notice)
        elif notice.kind == LAYOUT:
            ranks = tuple(notice.facts.get("ranks") or ())
            self._notices.add((LAYOUT, notice.facts.get("number"), ranks), notice)
        return ()

    def tick(self, case: Case, now_s: float) -> Iterable[Finding]:
        """What all ranks have told."""
        yield from self._judge(case, now_s, force=False)

    def end(self, case: Case) -> Iterable[Finding]:
        """What some have told."""
        yield from self._judge(case, 0.0, force=True)

    def _judge(self, case: Case, now_s: float, *, force: bool) -> Iterator[Finding]:
        for together in self._notices.ready(case, now_s, force=force):
            if together.key[0] == HOST:  # ty: ignore[not-subscriptable]
                yield from _interfaces(case, together)
                yield from _versions(together)
            elif len({bytes(facts["digest"]) for facts in together.facts.values()}) > 1:
                yield _layouts(together)


def _middle(offsets: dict[int, float]) -> float:
    """The lower median; of two ranks the one that agrees better with the collector."""
    if len(offsets) == 2:
        return min(offsets.values(), key=abs)
    return sorted(offsets.values())[(len(offsets) - 1) // 2]


def _interfaces(case: Case, together: Together) -> Iterator[Finding]:
    for library in ("gloo", "nccl"):
        problems = {rank: str(facts[library]) for rank, facts in sorted(together.facts.items()) if facts.get(library)}
        if not problems:
            continue
        ranks = () if len(problems) == len(together.facts) else tuple(problems)
        yield Finding(
            code="CIUIC-K1",
            cause=f"{next(iter(problems.values()))} ({ranks_text(ranks)})",
            step=1,
            ranks=ranks,
            evidence={"problem": next(iter(problems.values()))[:200]},
            confidence=0.95,
        )


def _versions(together: Together) -> Iterator[Finding]:
    for name in ("torch", "python"):
        values = {rank: str(facts["versions"].get(name, "")) for rank, facts in sorted(together.facts.items())}
        if len(set(values.values())) > 1:
            yield _differs(
                f"version of {name}", values, severity=Severity.WARNING, fix=f"install the same {name} on all nodes"
            )
            return


def _differs(what: str, values: dict[int, Any], *, severity: Severity | None, fix: str) -> Finding:
    odd = odd_ones(values)
    told = ", ".join(f"{value} on rank {rank}" for rank, value in list(values.items())[:VALUES_MAX])
    return Finding(
        code="CIUIC-K3",
        cause=f"{ranks_text(odd)} has another {what} than the others: {told}",
        step=1,
        ranks=odd,
        modules=(),
        evidence={f"rank_{rank}": str(value) for rank, value in list(values.items())[:VALUES_MAX]},
        fix=fix,
        confidence=0.9,
        severity=severity,
    )


def _layouts(together: Together) -> Finding:
    facts = dict(sorted(together.facts.items()))
    odd = odd_ones({rank: bytes(each["digest"]) for rank, each in facts.items()})
    usual = next(each for rank, each in facts.items() if rank not in odd)
    theirs = facts[odd[0]]
    names = [*usual["parts"], *(name for name in theirs["parts"] if name not in usual["parts"])]
    different = [name for name in names if usual["parts"].get(name) != theirs["parts"].get(name)]
    where = f", first in {different[0]}" if different else " in names, shapes or types"
    return Finding(
        code="CIUIC-K3",
        cause=f"{ranks_text(odd)} builds another model: {theirs['tensors']} trainable tensors with "
        f"{theirs['elements']} elements, the others {usual['tensors']} with {usual['elements']}{where}",
        step=1,
        ranks=odd,
        modules=tuple(different[:4]),
        evidence={f"elements_rank_{rank}": int(each["elements"]) for rank, each in list(facts.items())[:VALUES_MAX]},
        confidence=0.97,
    )

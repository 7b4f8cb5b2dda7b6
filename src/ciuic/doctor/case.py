"""All that the collector knows of one run, in the form in which the rules ask for it."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ciuic.doctor.facts import UNEVEN
from ciuic.doctor.finding import Blind, Finding, Revised
from ciuic.doctor.record import Beat, Bye, Facts, Hello, Record

ROUNDS_HELD = 64
"""Of each optimizer."""
REPLICAS = "replicas"
"""Fact of a record: the ranks that must hold the same parameters as this one; absent: all ranks."""


@dataclass(kw_only=True)
class Round:
    """The records of one step of one optimizer, of all ranks that sent one."""

    optimizer: int
    step: int
    began_s: float
    """Of the collector's clock, monotonic: when the first record came."""
    records: dict[int, Record] = field(default_factory=dict)
    judged: bool = False

    def values(self, name: str) -> dict[int, Any]:
        """A fact by rank, of the ranks that have it."""
        return {rank: record.facts[name] for rank, record in sorted(self.records.items()) if name in record.facts}

    @property
    def is_uneven(self) -> bool:
        """Whether a rank has made steps without inputs, or none while others had some."""
        return any(record.facts.get(UNEVEN) for record in self.records.values())

    def groups(self) -> list[tuple[int, ...]]:
        """Ranks that must agree, in groups of at least two; only ranks with a record. None when their steps are not the
        same ones."""
        if self.is_uneven:
            return []
        found: set[tuple[int, ...]] = set()
        for rank, record in self.records.items():
            members = record.facts.get(REPLICAS)
            ranks = tuple(sorted(set(members) & set(self.records))) if members else tuple(sorted(self.records))
            if len(ranks) > 1 and rank in ranks:
                found.add(ranks)
        return sorted(found)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question that went to several ranks, and what came back."""

    number: int
    kind: str
    facts: Facts
    ranks: tuple[int, ...]
    until_s: float
    about: Any
    """What the rule wants to remember with it."""
    answers: dict[int, Facts] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all have answered."""
        return len(self.answers) == len(self.ranks)


class Ask(Protocol):
    """Sends a question to ranks; the rule's `answered` is called with the answers, after a few seconds at most."""

    def __call__(self, rule: "Rule", kind: str, ranks: Iterable[int], *, facts: Facts, about: Any = None) -> None: ...


@dataclass(kw_only=True)
class Case:
    """One run under observation."""

    ask: Ask
    world: int = 0
    """Ranks in all, as the first hello says; 0: nobody has said hello."""
    hellos: dict[int, Hello] = field(default_factory=dict)
    beats: dict[int, Beat] = field(default_factory=dict)
    """The newest of each rank."""
    heard_s: dict[int, float] = field(default_factory=dict)
    """When anything came from the rank, of the collector's clock (monotonic)."""
    latest: dict[int, Record] = field(default_factory=dict)
    """The newest record of each rank."""
    byes: dict[int, Bye] = field(default_factory=dict)
    """Last words of each rank that had any."""
    gone: dict[int, str] = field(default_factory=dict)
    """Ranks that have left: `end`, an exception's line, or `cut` (the connection ended without a word)."""
    rounds: dict[tuple[int, int], Round] = field(default_factory=dict)
    """By optimizer and step; the newest ROUNDS_HELD of each optimizer."""
    findings: dict[tuple[str, tuple[str, ...]], Finding] = field(default_factory=dict)
    blind: list[Blind] = field(default_factory=list)
    exit_code: int | None = None
    """Of the command that was run, when the collector was told before it was closed."""
    looked: int = 0
    """Steps of the first optimizer that were compared."""
    is_ended: bool = False
    """Somebody has ended the program: what leaves now does so for no reason of its own."""
    lost: list[int] = field(default_factory=lambda: [0, 0])
    """Rounds that had to give way before all ranks had sent their records, and the step of the first."""
    _order: dict[int, deque[int]] = field(default_factory=dict)

    def round_of(self, record: Record, now_s: float) -> Round:
        """Where a record belongs; made when it is the first."""
        key = record.optimizer, record.step
        found = self.rounds.get(key)
        if found is None:
            found = self.rounds[key] = Round(optimizer=record.optimizer, step=record.step, began_s=now_s)
            order = self._order.setdefault(record.optimizer, deque())
            order.append(record.step)
            if len(order) > ROUNDS_HELD:
                self._forget(self.rounds.pop((record.optimizer, order.popleft()), None))
        return found

    def _forget(self, oldest: Round | None) -> None:
        if oldest is not None and not oldest.judged:
            self.lost = [self.lost[0] + 1, self.lost[1] or oldest.step]

    @property
    def steps(self) -> int:
        """Of the first optimizer so far, as far as was heard."""
        heard = [*self.beats.values(), *self.byes.values(), *self.latest.values()]
        return max((item.step for item in heard if getattr(item, "optimizer", 0) == 0), default=0)

    def present(self) -> list[int]:
        """Ranks that have said hello and have not left."""
        return [rank for rank in sorted(self.hellos) if rank not in self.gone]

    def has(self, *codes: str) -> bool:
        """Whether one of these was found already."""
        return any(finding.code in codes for finding in self.findings.values())


class Rule:
    """Looks at one class of faults. A rule keeps its own memory; each method yields what it found."""

    def hello(self, case: Case, hello: Hello) -> Iterable[Finding | Blind | Revised]:
        """A rank has connected."""
        return ()

    def round(self, case: Case, round: Round) -> Iterable[Finding | Blind | Revised]:
        """All present ranks have sent their record of a step, or patience ran out (two records, or world 1)."""
        return ()

    def notice(self, case: Case, notice: Any) -> Iterable[Finding | Blind | Revised]:
        """A rare event on one rank."""
        return ()

    def beat(self, case: Case, beat: Beat) -> Iterable[Finding | Blind | Revised]:
        """A sign of life."""
        return ()

    def answered(self, case: Case, asked: Asked) -> Iterable[Finding | Blind | Revised]:
        """The answers to a question of this rule; some may be missing."""
        return ()

    def left(self, case: Case, rank: int, how: str) -> Iterable[Finding | Blind | Revised]:
        """A rank said bye, or its connection was cut."""
        return ()

    def tick(self, case: Case, now_s: float) -> Iterable[Finding | Blind | Revised]:
        """Several times a second."""
        return ()

    def end(self, case: Case) -> Iterable[Finding | Blind | Revised]:
        """The run is over."""
        return ()


def odd_ones(values: Mapping[int, Any]) -> tuple[int, ...]:
    """The ranks whose value is not the most frequent one; in a tie the value of the lowest rank counts as right."""
    if not values:
        return ()
    counts: dict[Any, int] = {}
    for rank in sorted(values):
        value = values[rank]
        key = tuple(value) if isinstance(value, list) else value
        counts[key] = counts.get(key, 0) + 1
    right = max(counts, key=lambda key: counts[key])  # the first of several that are equally frequent
    as_key = {rank: tuple(value) if isinstance(value, list) else value for rank, value in values.items()}
    return tuple(rank for rank in sorted(as_key) if as_key[rank] != right)

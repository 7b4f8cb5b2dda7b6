"""Hand-made records for the doctor's rules: what ranks would have sent."""

from collections.abc import Iterable, Mapping
from typing import Any

from ciuic.doctor.case import Asked, Case, Round, Rule
from ciuic.doctor.finding import Finding
from ciuic.doctor.record import Facts, Hello, Notice, Record


class Room:
    """A case of some ranks, and the rules that look at it."""

    def __init__(self, rule: Rule, *, world: int = 2) -> None:
        self.rule, self.world = rule, world
        self.asked: list[Asked] = []
        self.case = Case(ask=self._ask, world=world)
        for rank in range(world):
            self.case.hellos[rank] = Hello(token="", rank=rank, world=world, host="here", pid=1)
        self.found: list[Finding] = []

    def step(self, step: int, facts: Mapping[int, Facts] | Facts, *, optimizer: int = 0) -> list[Finding]:
        """Records of one step: facts by rank, or the same for all; the findings of this step."""
        by_rank = (
            facts if facts and all(isinstance(key, int) for key in facts) else dict.fromkeys(range(self.world), facts)
        )
        round_ = Round(optimizer=optimizer, step=step, began_s=0.0)
        for rank, each in by_rank.items():
            record = Record(rank=int(rank), optimizer=optimizer, step=step, time_s=0.0, facts=dict(each))
            round_.records[int(rank)] = record
        return self._take(self.rule.round(self.case, round_))

    def notice(self, rank: int, kind: str, *, step: int = 0, **facts: Any) -> list[Finding]:
        """A rare event on one rank."""
        return self._take(self.rule.notice(self.case, Notice(rank=rank, step=step, kind=kind, facts=facts)))

    def end(self) -> list[Finding]:
        """The run is over."""
        return self._take(self.rule.end(self.case))

    def answer(self, answers: dict[int, Facts]) -> list[Finding]:
        """To the last question."""
        asked = self.asked.pop()
        asked.answers.update(answers)
        return self._take(self.rule.answered(self.case, asked))

    def _take(self, items: Iterable[Any]) -> list[Finding]:
        new = [item for item in items if isinstance(item, Finding)]
        self.found += new
        return new

    def _ask(self, rule: Rule, kind: str, ranks: Iterable[int], *, facts: Facts, about: Any = None) -> None:
        number = len(self.asked) + 1
        self.asked.append(Asked(number=number, kind=kind, facts=facts, ranks=tuple(ranks), until_s=1.0, about=about))

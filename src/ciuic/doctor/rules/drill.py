"""From two roots that differ down to the parameters that do: one question per level of the module tree."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ciuic.doctor.case import Asked, Case, Round, Rule, odd_ones
from ciuic.doctor.facts import CHILDREN
from ciuic.doctor.finding import Blind, Finding

BREADTH_MAX = 16
"""Paths that differ on one level and are looked into further."""
QUESTIONS_MAX = 64
"""Of one search; after that only the first differing path of each level is followed."""
Found = Callable[[Case, "Drill"], Iterable[Finding | Blind]]


@dataclass(eq=False, kw_only=True)
class Drill:
    """One search. When `open` is empty it is done; `leaves` are the tensors that differ, with each rank's digest."""

    of: str
    """One of facts.KINDS."""
    round: Round
    ranks: tuple[int, ...]
    found: Found
    leaves: dict[str, dict[int, bytes]] = field(default_factory=dict)
    equal: int = 0
    """Children that were equal on all ranks: 0 with differing ones means that all differ."""
    missing: tuple[int, ...] = ()
    """Ranks that did not answer."""
    open: int = 0
    asked: int = 0

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks that differ from most in the first differing tensor."""
        first = next(iter(self.leaves.values()), {})
        return odd_ones(first)

    @property
    def complete(self) -> bool:
        """Whether every differing path was followed to its tensor."""
        return not self.missing


def drill(case: Case, rule: Rule, search: Drill) -> None:
    """Ask for the first level; the rule's `answered` must hand the answers to `follow`."""
    _ask(case, rule, search, "")


def follow(case: Case, rule: Rule, asked: Asked) -> Iterable[Finding | Blind]:
    """Go one level deeper where the answers differ; calls `found` once, at the end."""
    search: Drill = asked.about
    search.open -= 1
    search.missing = tuple(sorted({*search.missing, *(rank for rank in search.ranks if not asked.answers.get(rank))}))
    path = asked.facts["path"]
    names = sorted({name for facts in asked.answers.values() for name in facts})
    followed = 0
    for name in names:
        values = {rank: facts.get(name, b"") for rank, facts in asked.answers.items() if facts}
        if len(values) < 2 or len(set(values.values())) == 1:
            search.equal += 1
        elif name == path:  # a tensor has itself as its only child
            search.leaves[name] = values
        elif followed < (BREADTH_MAX if search.asked < QUESTIONS_MAX else 1):
            followed += 1
            _ask(case, rule, search, name)
    if search.open == 0:
        yield from search.found(case, search)


def _ask(case: Case, rule: Rule, search: Drill, path: str) -> None:
    search.open += 1
    search.asked += 1
    facts = {"of": search.of, "optimizer": search.round.optimizer, "step": search.round.step, "path": path}
    case.ask(rule, CHILDREN, search.ranks, facts=facts, about=search)

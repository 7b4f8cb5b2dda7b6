"""Hand-made records of ranks for the doctor's rules, and answers to what the rules ask."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ciuic.doctor.case import Asked, Case, Round, Rule
from ciuic.doctor.facts import CHILDREN
from ciuic.doctor.facts_model import BLOCKS, FLOW, MODE, NAMES, SIGNS
from ciuic.doctor.finding import Blind, Finding
from ciuic.doctor.record import Hello, Notice, Record

NOBODY = b"\0" * 8


@dataclass(kw_only=True)
class Ranks:
    """Two ranks that say what a test tells them to. `tensors[rank][kind][step]` are digests by name."""

    rule: Rule
    world: int = 2
    mode: str = "ddp"
    tensors: dict[int, dict[str, dict[int, dict[str, bytes]]]] = field(default_factory=dict)
    sketches: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    _asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.case = Case(ask=self._ask, world=self.world)
        for rank in range(self.world):
            self.case.hellos[rank] = Hello(token="", rank=rank, world=self.world, host="h", pid=rank)

    def tell(self, rank: int, what: str, names: list[str], **facts: Any) -> None:
        """A NAMES notice."""
        facts = {"what": what, "names": names, "count": len(names), "optimizer": 0, "number": 1} | facts
        self.notice(rank, NAMES, **facts)

    def notice(self, rank: int, kind: str, *, at: int = 1, **facts: Any) -> None:
        self._take(self.rule.notice(self.case, Notice(rank=rank, step=at, kind=kind, facts=facts)))

    def step(self, step: int, *, optimizer: int = 0, flow: Any = (1, 1, 1, 1, 1, 0), **facts: Any) -> None:
        """One sampled step. A fact that is a dict is by rank, others are the same on all."""
        round_ = Round(optimizer=optimizer, step=step, began_s=0.0)
        for rank in range(self.world):
            mine = {name: value[rank] if isinstance(value, dict) else value for name, value in facts.items()}
            mine = {name: value for name, value in mine.items() if value is not None}
            mine = {MODE: self.mode, FLOW: list(flow[rank] if isinstance(flow, dict) else flow)} | mine
            for kind, steps in self.tensors.get(rank, {}).items():
                if step in steps:
                    mine[kind] = repr(sorted(steps[step].items())).encode()
            round_.records[rank] = Record(rank=rank, optimizer=optimizer, step=step, time_s=0.0, facts=mine)
        self.case.rounds[optimizer, step] = round_
        self._take(self.rule.round(self.case, round_))
        self._answer()

    def hold(self, kind: str, step: int, **by_name: Any) -> None:
        """Digests at a step: a tuple is by rank, anything else the same on all; `__` in a name stands for a dot."""
        for rank in range(self.world):
            values = {
                name.replace("__", "."): value[rank] if isinstance(value, tuple) else value
                for name, value in by_name.items()
            }
            self.tensors.setdefault(rank, {}).setdefault(kind, {})[step] = values

    def end(self) -> list[str]:
        """The codes found, in order."""
        self._answer()
        self._take(self.rule.end(self.case))
        return [finding.code.removeprefix("CIUIC-") for finding in self.findings]

    def _take(self, found: Iterable[Finding | Blind]) -> None:
        for item in found:
            assert isinstance(item, Finding)
            if item.key not in [known.key for known in self.findings]:
                self.findings.append(item)

    def _ask(self, rule: Rule, kind: str, ranks: Iterable[int], *, facts: dict[str, Any], about: Any = None) -> None:
        asked = Asked(number=0, kind=kind, facts=facts, ranks=tuple(ranks), until_s=0.0, about=about)
        self._asked.append(asked)

    def _answer(self) -> None:
        while self._asked:
            asked = self._asked.pop(0)
            for rank in asked.ranks:
                if asked.kind == CHILDREN:  # flat: every tensor is a child of the root, then of itself
                    held = self.tensors[rank][asked.facts["of"]].get(asked.facts["step"], {})
                    path = asked.facts["path"]
                    asked.answers[rank] = {path: held[path]} if path in held else dict(held)
                else:
                    asked.answers[rank] = {
                        n: s for n, s in self.sketches.get(rank, {}).items() if n in asked.facts["names"]
                    }
            self._take(self.rule.answered(self.case, asked))


def sketch(values: Iterable[float], *, block: int = 0) -> list[Any]:
    """As a rank describes a tensor: `values` fill the projections; `block` is what its first block's digest is."""
    numbers = (list(values) * SIGNS)[:SIGNS]
    length = sum(x * x for x in numbers) ** 0.5
    blocks = struct.pack(f">{BLOCKS}I", block, *[7] * (BLOCKS - 1))
    return [length, 4096, struct.pack(f"<{SIGNS}f", *numbers), blocks]

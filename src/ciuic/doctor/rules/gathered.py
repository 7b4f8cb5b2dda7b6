"""Notices of one kind from several ranks, judged together: when all have told, or after a while."""

import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ciuic.doctor.case import Case
from ciuic.doctor.record import Notice

WAIT_S = 2.0
KEYS_MAX = 256


@dataclass(kw_only=True)
class Together:
    """The facts of all ranks that told, and the first step at which one did."""

    key: Hashable
    since_s: float
    step: int
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    is_over: bool = False

    @property
    def any(self) -> dict[str, Any]:
        """Of the lowest rank."""
        return self.facts[min(self.facts)]

    def ranks(self, case: Case) -> tuple[int, ...]:
        """That told; empty when all did."""
        return () if len(self.facts) >= max(len(case.hellos), 1) else tuple(sorted(self.facts))


class Gathered:
    """Notices by key."""

    def __init__(self) -> None:
        self._all: dict[Hashable, Together] = {}

    def add(self, key: Hashable, notice: Notice) -> None:
        """The first of each rank counts; what comes after a judgement does not."""
        if key not in self._all and len(self._all) >= KEYS_MAX:
            return
        known = self._all.setdefault(key, Together(key=key, since_s=time.monotonic(), step=notice.step))
        if not known.is_over:
            known.facts.setdefault(notice.rank, notice.facts)

    def ready(self, case: Case, now_s: float, *, force: bool = False) -> Iterator[Together]:
        """Each once."""
        for together in self._all.values():
            whole = len(together.facts) >= case.world or set(case.present()) <= set(together.facts)
            if not together.is_over and (force or whole or now_s - together.since_s > WAIT_S):
                together.is_over = True
                yield together


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`rank 1`, `ranks 1, 2`; `all ranks` for none."""
    if not ranks:
        return "all ranks"
    shown = ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

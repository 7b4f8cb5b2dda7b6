"""What ranks have told by name."""

from collections.abc import Iterable
from typing import Any

from ciuic.doctor.facts_model import NAMES
from ciuic.doctor.record import Notice


class Told:
    """The newest NAMES notice of each rank, optimizer and kind; and all of WRITTEN."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int, str], dict[str, Any]] = {}
        self.all: list[tuple[int, dict[str, Any]]] = []

    def hear(self, notice: Notice) -> None:
        """Keep it when it is one."""
        if notice.kind != NAMES or not isinstance(notice.facts.get("names"), list):
            return
        facts = notice.facts
        self._newest[notice.rank, int(facts.get("optimizer", 0)), str(facts.get("what"))] = facts
        if len(self.all) < 4096:
            self.all.append((notice.rank, facts))

    def names(self, what: str, optimizer: int, ranks: Iterable[int]) -> list[str]:
        """Of any of the ranks, in the order in which they told them."""
        found: dict[str, None] = {}
        for rank in ranks:
            found.update(dict.fromkeys(self._newest.get((rank, optimizer, what), {}).get("names", ())))
        return list(found)

    def by_rank(self, what: str, optimizer: int, ranks: Iterable[int]) -> dict[int, list[str]]:
        """Names that each rank told."""
        return {rank: list(self._newest.get((rank, optimizer, what), {}).get("names", ())) for rank in ranks}

    def count(self, what: str, optimizer: int, ranks: Iterable[int]) -> int:
        """How many there are on the rank that has most."""
        return max((int(self._newest.get((rank, optimizer, what), {}).get("count", 0)) for rank in ranks), default=0)

    def fact(self, what: str, optimizer: int, ranks: Iterable[int], name: str, default: Any = None) -> Any:
        """Another fact of the notice, of the first rank that has it."""
        for rank in ranks:
            facts = self._newest.get((rank, optimizer, what), {})
            if name in facts:
                return facts[name]
        return default


def listed(names: Iterable[str], *, at_most: int = 3, count: int = 0) -> str:
    """`a, b, c and 5 more`."""
    names = list(names)
    count = max(count, len(names))
    shown = names[:at_most]
    rest = count - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")

"""Who holds which sample numbers, found without asking every node."""

from bisect import bisect_left
from collections.abc import Iterable

from ciuic.ledger.intervals import IntervalSet, Range


class Holdings:
    """Each number has at most one holder: who gets it takes it from whoever had it."""

    def __init__(self) -> None:
        self.by_node: dict[str, IntervalSet] = {}
        self._pieces: list[tuple[int, int, str]] = []
        """(start, stop, node), sorted and disjoint."""
        self._total = 0
        self.holders = 0
        """How many nodes hold something."""

    def __len__(self) -> int:
        """How many numbers are held."""
        return self._total

    def count(self, node: str) -> int:
        """How many numbers the node holds."""
        held = self.by_node.get(node)
        return 0 if held is None else len(held)

    def give(self, node: str, start: int, stop: int) -> None:
        """The node holds [start, stop) now."""
        if start >= stop:
            return
        self.take(start, stop)
        held = self.by_node.setdefault(node, IntervalSet())
        self.holders += not held
        held.add(start, stop)
        self._total += stop - start
        at = bisect_left(self._pieces, (start,))
        if at and self._pieces[at - 1][1:] == (start, node):
            at -= 1
            start = self._pieces.pop(at)[0]
        if at < len(self._pieces) and self._pieces[at][0] == stop and self._pieces[at][2] == node:
            stop = self._pieces.pop(at)[1]
        self._pieces.insert(at, (start, stop, node))

    def take(self, start: int, stop: int) -> None:
        """Nobody holds any of [start, stop) any more."""
        self._remove(start, stop, self._within(start, stop))

    def take_from(self, node: str, start: int, stop: int) -> None:
        """The node holds nothing of [start, stop) any more; others keep theirs."""
        self._remove(start, stop, [piece for piece in self._within(start, stop) if piece[2] == node])

    def leave(self, node: str) -> None:
        """The node holds nothing any more."""
        held = self.by_node.pop(node, IntervalSet())
        self.holders -= bool(held)
        for start, stop in held:
            self._cut(start, stop, node)

    def within(self, start: int, stop: int) -> list[Range]:
        """The parts of [start, stop) that somebody holds."""
        return [(max(start, a), min(stop, b)) for a, b, _ in self._within(start, stop)]

    def _within(self, start: int, stop: int) -> list[tuple[int, int, str]]:
        """The pieces that overlap [start, stop)."""
        if start >= stop:
            return []
        first = bisect_left(self._pieces, (start,))
        if first and self._pieces[first - 1][1] > start:
            first -= 1
        return self._pieces[first : bisect_left(self._pieces, (stop,))]

    def _remove(self, start: int, stop: int, pieces: Iterable[tuple[int, int, str]]) -> None:
        for a, b, node in pieces:
            held = self.by_node[node]
            held.remove(max(start, a), min(stop, b))
            self.holders -= not held
            self._cut(max(start, a), min(stop, b), node)

    def _cut(self, start: int, stop: int, node: str) -> None:
        """Take [start, stop), which lies in one piece of the node, out of it."""
        at = bisect_left(self._pieces, (start + 1,)) - 1
        self._total -= stop - start
        a, b, _ = self._pieces[at]
        if a == start and b == stop:
            del self._pieces[at]
            return
        rest = [(x, y, node) for x, y in ((a, start), (stop, b)) if x < y]
        self._pieces[at : at + 1] = rest

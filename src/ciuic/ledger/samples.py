"""The sample ledger: every sample of the run is trained once, whoever dies.

A sample is free, leased to a node, pushed (in an accepted push that waits for its round) or committed (its push is
in an entry). Leases of a node that is gone become free again, and so do those that a worker gives back unstarted. A
late push whose samples were leased again in the meantime still merges; the overlap is counted as duplicated.
"""

from collections.abc import Iterable

from ciuic.ledger.holdings import Holdings
from ciuic.ledger.intervals import IntervalSet, Range


class SampleLedger:
    """Who has which samples of [0, total)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = IntervalSet([(0, total)] if total else [])
        self._held = Holdings()
        self.committed = IntervalSet()
        self.ever_leased = IntervalSet()
        self.duplicated = 0
        self.waiting = IntervalSet()
        """In accepted pushes that wait for their round."""

    @property
    def leased(self) -> dict[str, IntervalSet]:
        """What each node holds that it has not pushed."""
        return self._held.by_node

    @property
    def held(self) -> int:
        """Distinct samples that are leased or wait in an accepted push, and not committed."""
        held = self.waiting.copy()
        for owned in self.leased.values():
            for start, stop in owned:
                held.add(start, stop)
        for start, stop in self.committed:
            held.remove(start, stop)
        return len(held)

    def lease(self, node: str, count: int) -> list[Range]:
        """Up to `count` free samples, smallest first, now leased to `node`."""
        ranges = self.free.take(count)
        self._own(node, ranges)
        return ranges

    def restore_lease(self, node: str, ranges: Iterable[Range]) -> None:
        """Repeat a lease from the journal."""
        ranges = list(ranges)
        for start, stop in ranges:
            self.free.remove(start, stop)
        self._own(node, ranges)

    def _own(self, node: str, ranges: list[Range]) -> None:
        for start, stop in ranges:
            self._held.give(node, start, stop)
            self.ever_leased.add(start, stop)

    def accept(self, ranges: Iterable[Range]) -> None:
        """A push with these samples is durable: nobody else gets them."""
        for start, stop in ranges:
            self.free.remove(start, stop)
            self.waiting.add(start, stop)
            self._held.take(start, stop)

    def reject(self, node: str, ranges: Iterable[Range]) -> None:
        """An accepted push was rejected when its round closed: its samples are the node's to push again."""
        for start, stop in ranges:
            self.waiting.remove(start, stop)
            self._held.give(node, start, stop)

    def release(self, ranges: Iterable[Range]) -> None:
        """Samples of an accepted push that will not merge and whose node is gone: free again."""
        for start, stop in ranges:
            self.waiting.remove(start, stop)
            self._free(start, stop)

    def _free(self, start: int, stop: int) -> None:
        """Those of [start, stop) that nobody has and no entry holds are free again."""
        missing = IntervalSet([(start, stop)])
        for taken in (self.committed, self.waiting, self._held):
            for a, b in taken.within(start, stop):
                missing.remove(a, b)
        for a, b in missing:
            self.free.add(a, b)

    def commit(self, ranges: Iterable[Range]) -> None:
        """A push with these samples is in an entry."""
        for start, stop in ranges:
            self.free.remove(start, stop)
            self.waiting.remove(start, stop)
            self.ever_leased.add(start, stop)
            self.duplicated += self.committed.add(start, stop)
            self._held.take(start, stop)

    def give_back(self, node: str, ranges: Iterable[Range] | None = None) -> list[Range]:
        """Leased samples of a node (all, or those given) are free again; returns the ranges that went back."""
        returned = list(self.leased.get(node, ())) if ranges is None else list(ranges)
        for start, stop in returned:
            self._held.take_from(node, start, stop)
            self._free(start, stop)
        return returned

    def owned(self, node: str, ranges: Iterable[Range]) -> list[Range]:
        """What of these the node holds now."""
        return self.leased.get(node, IntervalSet()).common(ranges)

    def not_owned(self, node: str, ranges: Iterable[Range]) -> list[Range]:
        """What of these the node does not hold (any more)."""
        missing = IntervalSet(ranges)
        for start, stop in self.leased.get(node, IntervalSet()):
            missing.remove(start, stop)
        return list(missing)

    def leave(self, node: str, returned: Iterable[Range]) -> None:
        """Repeat from the journal that a worker has gone: these went back, its other leases were in pushes."""
        self.give_back(node, returned)
        self._held.leave(node)

    def find_lost(self) -> None:
        """After a replay: what is nowhere was in a push that was rejected when its worker was gone. It is free."""
        self._free(0, self.total)

    @property
    def holders(self) -> int:
        """How many nodes hold samples that they have not pushed."""
        return self._held.holders

    def outstanding(self, node: str) -> int:
        """How many samples the node holds that it has not pushed."""
        return self._held.count(node)

    @property
    def complete(self) -> bool:
        """Every sample is committed."""
        return len(self.committed) == self.total

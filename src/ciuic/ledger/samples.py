"""The sample ledger: every sample of the run is trained once, whoever dies.

A sample is free, leased to a node, pushed (in an accepted push that waits for its round) or committed (its push is
in an entry). Leases of a node that is gone become free again. A late push whose samples were leased again in the
meantime still merges; the overlap is counted as duplicated.
"""

from collections.abc import Iterable

from ciuic.ledger.intervals import IntervalSet, Range


class SampleLedger:
    """Who has which samples of [0, total)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = IntervalSet([(0, total)] if total else [])
        self.leased: dict[str, IntervalSet] = {}
        self.committed = IntervalSet()
        self.ever_leased = IntervalSet()
        self.duplicated = 0
        self.waiting = IntervalSet()
        """In accepted pushes that wait for their round."""

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

    def allowance(self, node: str, present: Iterable[str], *, sharers: int, smallest: int) -> int:
        """What a node may lease now: it never holds more than half of its part of what is left to train.

        So holdings shrink towards the end (to `smallest`), and nobody sits on the last samples while others idle.
        """
        left = len(self.free) + sum(self.outstanding(other) for other in present)
        held, fair = self.outstanding(node), max(smallest, left // (2 * max(1, sharers)))
        return fair - held if not held or fair - held >= smallest else 0

    def restore_lease(self, node: str, ranges: Iterable[Range]) -> None:
        """Repeat a lease from the journal."""
        ranges = list(ranges)
        for start, stop in ranges:
            self.free.remove(start, stop)
        self._own(node, ranges)

    def _own(self, node: str, ranges: list[Range]) -> None:
        owned = self.leased.setdefault(node, IntervalSet())
        for start, stop in ranges:
            owned.add(start, stop)
            self.ever_leased.add(start, stop)

    def accept(self, ranges: Iterable[Range]) -> None:
        """A push with these samples is durable: nobody else gets them."""
        for start, stop in ranges:
            self.free.remove(start, stop)
            self.waiting.add(start, stop)
            for owned in self.leased.values():
                owned.remove(start, stop)

    def reject(self, node: str, ranges: Iterable[Range]) -> None:
        """An accepted push was rejected when its round closed: its samples are the node's to push again."""
        owned = self.leased.setdefault(node, IntervalSet())
        for start, stop in ranges:
            self.waiting.remove(start, stop)
            owned.add(start, stop)

    def release(self, ranges: Iterable[Range]) -> None:
        """Samples of an accepted push that will not merge and whose node is gone: free again."""
        for start, stop in ranges:
            self.waiting.remove(start, stop)
            self._free(start, stop)

    def _free(self, start: int, stop: int) -> None:
        """Those of [start, stop) that nobody has and no entry holds are free again."""
        missing = IntervalSet([(start, stop)])
        for taken in (self.committed, self.waiting, *self.leased.values()):
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
            for owned in self.leased.values():
                owned.remove(start, stop)

    def give_back(self, node: str, ranges: Iterable[Range] | None = None) -> list[Range]:
        """Leased samples of a node (all, or those given) are free again; returns the ranges that went back."""
        owned = self.leased.get(node, IntervalSet())
        returned = list(owned) if ranges is None else list(ranges)
        for start, stop in returned:
            owned.remove(start, stop)
            self._free(start, stop)
        return returned

    def leave(self, node: str, returned: Iterable[Range]) -> None:
        """Repeat from the journal that a worker has gone: these went back, its other leases were in pushes."""
        self.give_back(node, returned)
        self.leased.pop(node, None)

    def find_lost(self) -> None:
        """After a replay: what is nowhere was in a push that was rejected when its worker was gone. It is free."""
        self._free(0, self.total)

    def outstanding(self, node: str) -> int:
        """How many samples the node holds that it has not pushed."""
        return len(self.leased.get(node, IntervalSet()))

    @property
    def complete(self) -> bool:
        """Every sample is committed."""
        return len(self.committed) == self.total

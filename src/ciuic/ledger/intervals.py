"""Sets of sample numbers as half-open ranges [start, stop)."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]


class IntervalSet:
    """A set of integers kept as sorted, disjoint, non-adjacent ranges."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._count = 0
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Range]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __len__(self) -> int:
        """How many integers are in the set."""
        return self._count

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> "IntervalSet":
        other = IntervalSet()
        other._starts, other._stops, other._count = self._starts.copy(), self._stops.copy(), self._count
        return other

    def add(self, start: int, stop: int) -> int:
        """Add [start, stop); returns how many of them were in the set already."""
        if start >= stop:
            return 0
        starts, stops = self._starts, self._stops
        first = bisect_left(stops, start)  # ranges that touch or overlap: first..last-1
        last = bisect_right(starts, stop)
        if first == last:
            starts.insert(first, start)
            stops.insert(first, stop)
            self._count += stop - start
            return 0
        if last == first + 1:  # one range, as a rule: it grows
            a, b = starts[first], stops[first]
            already = max(0, min(stop, b) - max(start, a))
            self._count += stop - start - already
            starts[first], stops[first] = min(start, a), max(stop, b)
            return already
        already = sum(max(0, min(stop, self._stops[i]) - max(start, self._starts[i])) for i in range(first, last))
        self._count += stop - start - already
        start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]
        return already

    def remove(self, start: int, stop: int) -> None:
        """Remove [start, stop); what is not in the set is ignored."""
        if start >= stop:
            return
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        if first == last:
            return
        if last == first + 1 and (self._starts[first] >= start or self._stops[first] <= stop):
            self._shorten(first, start, stop)
            return
        keep: list[Range] = []
        for i in range(first, last):
            self._count -= min(stop, self._stops[i]) - max(start, self._starts[i])
            if self._starts[i] < start:
                keep.append((self._starts[i], start))
            if self._stops[i] > stop:
                keep.append((stop, self._stops[i]))
        self._starts[first:last] = [a for a, _ in keep]
        self._stops[first:last] = [b for _, b in keep]

    def _shorten(self, index: int, start: int, stop: int) -> None:
        """Take [start, stop), which covers an end of one range, out of it."""
        a, b = self._starts[index], self._stops[index]
        if a >= start and b <= stop:
            self._count -= b - a
            del self._starts[index], self._stops[index]
        elif a >= start:
            self._count -= stop - a
            self._starts[index] = stop
        else:
            self._count -= b - start
            self._stops[index] = start

    def within(self, start: int, stop: int) -> list[Range]:
        """The ranges of the set inside [start, stop), cut at its ends."""
        if start >= stop:
            return []
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return [(max(start, self._starts[i]), min(stop, self._stops[i])) for i in range(first, last)]

    def common(self, ranges: Iterable[Range]) -> list[Range]:
        """What of these ranges is in the set, sorted and disjoint."""
        return list(IntervalSet(part for start, stop in ranges for part in self.within(start, stop)))

    def take(self, count: int) -> list[Range]:
        """Remove and return the `count` smallest members (fewer when there are fewer)."""
        taken: list[Range] = []
        while count > 0 and self._starts:
            start = self._starts[0]
            stop = min(self._stops[0], start + count)
            taken.append((start, stop))
            count -= stop - start
            self.remove(start, stop)
        return taken

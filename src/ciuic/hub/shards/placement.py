"""Which shard serves which fragment: measured traffic, balanced with few moves. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PUSH_COST_BYTES = 64 * 1024
"""What a push costs besides its bytes (a request, a durable write), as bytes."""
LEAST_GAIN = 0.05
"""A move must lower the largest load by this share: each costs a copy of the fragment."""
WINDOW_S = 60.0
"""Traffic is measured over so long."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Traffic of one fragment."""

    pushes_per_s: float = 0.0
    push_bytes_per_s: float = 0.0
    entry_bytes_per_s: float = 0.0
    """Each entry once."""

    def weight(self, readers: int) -> float:
        """Bytes per second that its place moves when `readers` nodes fetch each entry."""
        moved = self.push_bytes_per_s + max(1, readers) * self.entry_bytes_per_s
        return moved + PUSH_COST_BYTES * self.pushes_per_s


@dataclass(kw_only=True)
class Traffic:
    """What rounds cost, by fragment, over the last minute."""

    _rounds: dict[int, deque[tuple[float, int, int, int]]] = field(default_factory=dict)
    _since_s: dict[int, float] = field(default_factory=dict)

    def observe(self, fragment: int, at_s: float, pushes: int, push_bytes: int, entry_bytes: int) -> None:
        """A round of a fragment ended at this time."""
        rounds = self._rounds.setdefault(fragment, deque())
        self._since_s.setdefault(fragment, at_s)
        rounds.append((at_s, pushes, push_bytes, entry_bytes))
        while rounds[0][0] < at_s - WINDOW_S:
            rounds.popleft()

    def rates(self, fragment: int, now_s: float) -> Rates:
        """Of one fragment; all zero when nothing happened in the window."""
        seen = [x for x in self._rounds.get(fragment, ()) if x[0] >= now_s - WINDOW_S]
        span_s = min(WINDOW_S, max(1.0, now_s - self._since_s.get(fragment, now_s)))
        pushes, push_bytes, entry_bytes = (sum(x[i] for x in seen) / span_s for i in (1, 2, 3))
        return Rates(pushes_per_s=pushes, push_bytes_per_s=push_bytes, entry_bytes_per_s=entry_bytes)


def loads(weights: Mapping[int, float], owners: Mapping[int, str], places: Iterable[str]) -> dict[str, float]:
    """Load of each place."""
    total = dict.fromkeys(places, 0.0)
    for fragment, weight in weights.items():
        total[owners[fragment]] = total.get(owners[fragment], 0.0) + weight
    return total


def place(weights: Mapping[int, float], fixed: Mapping[int, str], places: Iterable[str]) -> dict[int, str]:
    """An owner for each fragment: the largest first, each to the place with the least load; `fixed` ones stay."""
    owners = dict(fixed)
    free = list(places)
    load = loads({f: weights[f] for f in fixed}, fixed, free)
    for fragment in sorted(weights.keys() - fixed.keys(), key=lambda f: (-weights[f], f)):
        owners[fragment] = min(free, key=lambda name: (load[name], name))
        load[owners[fragment]] += weights[fragment]
    return owners


def rebalance(
    weights: Mapping[int, float], owners: Mapping[int, str], places: Iterable[str], fixed: Iterable[int]
) -> dict[int, str]:
    """Moves (fragment -> its new place) that lower the largest load, as few as do it; {} when it is good as it is.

    Only fragments outside `fixed` move, and only to `places`. Each move takes from the most loaded place.
    """
    places, stay, now = sorted(places), set(fixed), dict(owners)
    moves: dict[int, str] = {}
    for _ in range(len(weights)):
        best = _best_move(weights, now, places, stay | moves.keys())
        if best is None:
            break
        fragment, to = best
        now[fragment] = moves[fragment] = to
    return moves


def _best_move(
    weights: Mapping[int, float], owners: Mapping[int, str], places: list[str], stay: set[int]
) -> tuple[int, str] | None:
    load = loads(weights, owners, places)
    if not load:
        return None
    fullest = max(load, key=lambda name: (load[name], name))
    chosen, lowest = None, load[fullest] * (1 - LEAST_GAIN)
    for fragment in sorted(f for f, name in owners.items() if name == fullest and f not in stay and weights[f] > 0):
        for to in places:
            peak = max(load[fullest] - weights[fragment], load[to] + weights[fragment])
            if to != fullest and peak < lowest:
                chosen, lowest = (fragment, to), peak
    return chosen

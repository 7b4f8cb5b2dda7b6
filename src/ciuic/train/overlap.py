"""Whether a push waits for its entry at the step boundary, or training goes on meanwhile.

Overlap is not free: work done on an older base counts less. So wait while communication is under about 3 % of a
round, and overlap above that. A wait is always bounded by that share, so a dead or slow peer cannot stall a node.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ciuic.plan.predict import WAIT_SHARE

PATIENCE = 1.5
"""Wait up to this multiple of the usual time."""


@dataclass(kw_only=True)
class WaitRule:
    """Learns from measured rounds how long a push may wait for its entry."""

    mode: Literal["auto"] | bool = "auto"
    """auto; True: always overlap; False: always wait (the synchronous textbook form)."""
    parts: int = 1
    """Fragments that share the waiting time of a round."""
    _round_s: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    _flight_s: deque[float] = field(default_factory=lambda: deque(maxlen=9))

    def observe_round(self, compute_s: float) -> None:
        """Time of the inner steps between two pushes, without waits."""
        self._round_s.append(compute_s)

    def observe_flight(self, seconds: float) -> None:
        """Time from a push to the arrival of the entry that merged it."""
        self._flight_s.append(seconds)

    def budget_s(self) -> float:
        """How long the push just made may wait; 0: go on at once."""
        if self.mode is True:
            return 0.0
        if self.mode is False:
            return float("inf")
        if not self._round_s or not self._flight_s:
            return 0.0
        round_s, flight_s = median(self._round_s), median(self._flight_s)
        most_s = WAIT_SHARE / (1 - WAIT_SHARE) * round_s / self.parts
        return min(PATIENCE * flight_s, most_s) if flight_s <= most_s else 0.0

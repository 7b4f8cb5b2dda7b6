"""How the samples that are left are shared out, so that all workers run dry at the same time. Pure.

A worker that is far from the end leases ahead for as long as it was told (the outage it must outlast). Towards the end
nobody may hold more than half of its part of what is left, in proportion to its speed, so holdings shrink with what is
left. When nothing is free any more and one worker would idle while another has much, that one gives back what it has
not started.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor

import msgspec

SMALL_LEASE = 32
"""Leases of workers whose speed is not known are not made smaller than this."""
SMALL_LEASE_S = 2.0
"""... of the others not smaller than what they train in this time: a lease costs a round trip."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in the run."""

    ready: float
    """Samples that it has leased and not started."""
    rate: float = 0.0
    """Samples per second; 0: not known yet."""
    step: int = 1
    """Samples of one of its steps."""

    @property
    def smallest(self) -> int:
        """What is worth a lease of its own."""
        return max(self.step, ceil(self.rate * SMALL_LEASE_S) if self.rate else SMALL_LEASE)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What is left, and how fast it is trained, at one moment."""

    left: float
    """Samples that nobody has started."""
    rate: float
    """Of all workers together, in samples per second."""
    usual: float
    """What one that is not known yet counts as."""

    def part(self, holder: Holder) -> float:
        """Samples that are its part of what is left: with it all end together."""
        return self.left * (holder.rate or self.usual) / self.rate

    def allowance(self, holder: Holder) -> int:
        """How many samples this worker may lease now: at most half of its part, less what it has."""
        room = max(float(holder.smallest), self.part(holder) / 2) - holder.ready
        is_worth_it = not holder.ready or room >= holder.smallest / 2
        return max(0, floor(room)) if is_worth_it else 0

    def surplus(self, holder: Holder, asking: Iterable[Holder]) -> int:
        """When nothing is free: how many samples, in whole steps, it should give back for the others that ask."""
        over = holder.ready - self.part(holder)
        if over < holder.step or not any(self.part(other) - other.ready >= other.step for other in asking):
            return 0
        return floor(over / holder.step) * holder.step


def make_pool(holders: Iterable[Holder], *, free: int, sharers: int) -> Pool:
    """`free`: samples that nobody has; `sharers`: how many workers there will be at least."""
    holders = list(holders)
    known = [holder.rate for holder in holders if holder.rate > 0]
    total = sum(known)
    usual = total / len(known) if known else 1.0
    others = max(len(holders), sharers, 1) - len(known)
    left = free + sum([holder.ready for holder in holders])
    return Pool(left=left, rate=total + usual * others, usual=usual)

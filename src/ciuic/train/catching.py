"""Whether a joiner gets nearer to the end of the ledger, or its link is slower than the ledger grows. Pure.

A joiner fetches all entries there are; meanwhile new ones appear, and it fetches those. The age of the newest entry it
has shrinks from fetch to fetch when the link is fast enough. It is compared with itself only, so it does not matter
how the clocks of hub and node are set.
"""

from dataclasses import dataclass, field

from ciuic.errors import CannotCatchUpError
from ciuic.units import format_rate

STALE_LIMIT = 8
"""So many pushes in a row, each at a newer version of the hub, that came too late to merge, too."""
ATTEMPTS = 3
"""So many fetches in a row that bring a joiner no nearer are enough..."""
LEAST_S = 3.0
"""... when they took so long at least: a short stall of the link decides nothing."""
EXPIRED_LIMIT = 3
"""So many snapshots that newer ones replaced while they were downloaded, too."""


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """One answer with entries."""

    entries: int
    size_bytes: int
    seconds: float
    """How long it took."""
    age_s: float
    """Of its newest entry when all of it was here, by clocks that may differ."""


@dataclass(kw_only=True)
class CatchUp:
    """Of one attachment and fragment."""

    near: int
    """So many entries behind is near enough to train: the rest comes meanwhile."""
    _fetches: list[Fetch] = field(default_factory=list)

    def fetched(self, fetch: Fetch) -> bool:
        """True: near enough after many fetches. Raises CannotCatchUpError when they brought this node no nearer."""
        self._fetches.append(fetch)
        latest = self._fetches[-ATTEMPTS - 1 :]
        seconds = sum(x.seconds for x in latest[1:])
        if len(latest) <= ATTEMPTS or latest[-1].age_s < latest[0].age_s:
            return False
        if fetch.entries <= self.near:
            return True
        if seconds < LEAST_S:
            return False
        rate = 8 * sum(x.size_bytes for x in latest[1:]) / seconds
        raise cannot_catch_up(
            f"{ATTEMPTS} fetches of new entries left it {latest[-1].age_s - latest[0].age_s:.1f} s further behind; "
            f"its link brings {format_rate(rate)}"
        )


@dataclass(kw_only=True)
class Lateness:
    """Of one fragment's pushes, while the node trains."""

    times: int = 0
    hub_version: int = -1

    def stale(self, hub_version: int) -> None:
        """Another push was based on a version too old. Raises CannotCatchUpError when that does not end."""
        if hub_version > self.hub_version:  # else it is not the ledger that runs away
            self.times, self.hub_version = self.times + 1, hub_version
        if self.times >= STALE_LIMIT:
            raise cannot_catch_up(f"{self.times} pushes in a row came so late that the base they are from is too old")

    def arrived(self) -> None:
        """One was in time."""
        self.times = 0


def check_expired(times: int) -> None:
    """Raises CannotCatchUpError when too many snapshots were replaced while they were downloaded."""
    if times >= EXPIRED_LIMIT:
        raise cannot_catch_up(f"{times} snapshots were replaced by newer ones while it downloaded them")


def cannot_catch_up(cause: str) -> CannotCatchUpError:
    """What such a node is told, and the hub's operator."""
    return CannotCatchUpError(
        "this node cannot catch up with the run: the ledger grows faster than its link brings it",
        cause=cause,
        next="give the node a faster link, or let the run send less: fewer bits or a longer interval (`ciuic sync`)",
    )

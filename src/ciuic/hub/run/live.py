"""A run as the fragments that the hub serves see it now: like `RunView`, but each fact is found when it is asked for.

A push asks for little. What takes a look at every member is kept until a member comes, goes or gets another state, so
that a round of N nodes costs N looks, not N times N.
"""

from typing import TYPE_CHECKING

from ciuic.hub.run.members import PRESENT, Member
from ciuic.hub.run.pace import balanced_intervals

if TYPE_CHECKING:
    from ciuic.hub.run.rounds import RunLedger

SAME_SPEED = 0.02
"""A node's step time has changed when it moved by this share."""
CHANGED_SHARE = 0.1
"""Intervals are computed again when more than this share of the nodes have another speed."""


class Roll:
    """Who is at work. Valid for one membership epoch of the run; `forget` when a member changes without a new one."""

    def __init__(self, members: dict[str, Member]) -> None:
        self._members = members
        self._epoch: int | None = None
        self._at_work: list[Member] = []
        self._settled: list[Member] = []

    def forget(self) -> None:
        """Look again next time."""
        self._epoch = None

    def at_work(self, epoch: int) -> list[Member]:
        """Members that are present."""
        self._look(epoch)
        return self._at_work

    def settled(self, epoch: int) -> list[Member]:
        """Those of them that rounds wait for: not the silent, nor joiners before their first push, unless all are."""
        self._look(epoch)
        return self._settled

    def _look(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._at_work = [member for member in self._members.values() if member.state in PRESENT]
            heard = [member for member in self._at_work if not member.is_silent]
            self._settled = [member for member in heard if member.state == "training"] or heard


class Paces:
    """Steps per push of each node, computed again when members or enough speeds have changed."""

    def __init__(self) -> None:
        self._key = (0, False)
        self._used_s: dict[str, float] = {}
        self._changed: set[str] = set()
        self._intervals: dict[str, int] = {}

    def heard(self, member: Member) -> None:
        """A node has told its step time."""
        used_s, now_s = self._used_s.get(member.node, 0.0), _step_s(member)
        if abs(now_s - used_s) > SAME_SPEED * used_s:
            self._changed.add(member.node)

    def intervals(self, members: list[Member], interval: int, *, together: bool) -> dict[str, int]:
        """By node; who is not in it makes `interval` steps. `together`: all make every step at the same time."""
        changed = len(self._changed) + abs(len(members) - len(self._used_s))
        if (interval, together) != self._key or changed > CHANGED_SHARE * len(members):
            self._key, self._changed = (interval, together), set()
            self._used_s = {member.node: _step_s(member) for member in members}
            same = dict.fromkeys(self._used_s, interval)
            self._intervals = same if together else balanced_intervals(interval, self._used_s)
        return self._intervals


def _step_s(member: Member) -> float:
    return member.report.step_s if member.report else 0.0


class LiveView:
    """See the module. Works on its ledger, whose lock the caller holds."""

    def __init__(self, ledger: "RunLedger") -> None:
        self._ledger = ledger
        self.roll = Roll(ledger.members)
        self.paces = Paces()

    @property
    def at_work(self) -> int:
        """How many nodes train."""
        return len(self.roll.at_work(self._ledger.epoch))

    @property
    def fewest(self) -> int:
        """At least so many nodes push before a round is complete."""
        ledger = self._ledger
        settled = len(self.roll.settled(ledger.epoch))
        if ledger.samples.free:
            return settled
        others = len(self.roll.at_work(ledger.epoch)) - settled  # they may be among those who still have samples
        return max(1, ledger.samples.holders - others)

    @property
    def expected(self) -> list[str]:
        """Members whose push a round waits for: not joiners before their first push, nor nodes without samples."""
        samples, settled = self._ledger.samples, self.roll.settled(self._ledger.epoch)
        return [x.node for x in settled if samples.free or samples.outstanding(x.node)]

    @property
    def behind(self) -> dict[str, list[int]]:
        """Nodes that have not pushed all they trained: the fragments whose rounds wait for them too."""
        return {x.node: x.behind for x in self.roll.settled(self._ledger.epoch) if x.behind}

    @property
    def intervals(self) -> dict[str, int]:
        """Steps per push of each node, in proportion to its speed."""
        ledger = self._ledger
        members = self.roll.at_work(ledger.epoch)
        together = ledger.layout is not None and ledger.layout.step is not None  # gradients
        return self.paces.intervals(members, ledger.settings.interval, together=together)

    @property
    def stretches(self) -> list[int]:
        """Intervals between two pushes of each fragment; empty: 1."""
        return self._ledger.stretches()

    @property
    def epoch(self) -> int:
        """Of the membership."""
        return self._ledger.epoch

    @property
    def total_samples(self) -> int:
        """Of the run."""
        return self._ledger.samples.total

    @property
    def sealed(self) -> bool:
        """Somebody was told the last version: no more pushes."""
        return self._ledger.sealed

"""Leases of one run: who may train which samples, what comes back, and from whom others take over.

Each change is in the journal before it is answered. A worker says with each request what it has in hand; the hub says
what of that is not its own any more. So a worker that was thought lost and speaks again keeps what nobody else has
taken, and drops the rest unstarted: a sample is trained twice only when two had started it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ciuic.errors import ConflictError, ProtocolError, StorageError
from ciuic.hub.run.members import Member
from ciuic.hub.run.sharing import Holder, Pool, make_pool
from ciuic.ledger.intervals import IntervalSet, Range
from ciuic.ledger.journal import Leased, Recovered, Returned
from ciuic.net import messages as m

if TYPE_CHECKING:
    from ciuic.hub.run.rounds import RunLedger

MAX_LEASE = 1 << 20
MAX_RANGES = 4096
"""In one list of a request."""
SILENT_S = 5.0
"""A worker reports every second; what is shorter than this is no silence, however short the job's grace is."""
REOPENED_S = 10.0
"""After a start of the hub workers are granted so much more: they try again every few seconds."""
STOOD_STILL_S = 2.0
"""The ledger is ticked about once a second; a longer pause was the hub's own."""
POOL_S = 0.5
POOL_CHANGE = 0.05
"""What is left is counted anew after this time, or when this share of it was leased or came back."""
ASKS_STILL_S = 5.0
"""A worker that asked in vain so lately takes what others give back."""


@dataclass(frozen=True, kw_only=True)
class _Counted:
    pool: Pool
    at_s: float
    epoch: int
    free: int


class Leasing:
    """Works on its ledger, whose lock the caller holds."""

    def __init__(self, ledger: "RunLedger") -> None:
        self._ledger = ledger
        self._ticked_s = ledger.now_s
        self._counted: _Counted | None = None
        self._in_vain: dict[str, float] = {}
        """When a worker last asked for samples and got none."""
        self._sitting: set[str] = set()
        """Silent workers that had leases when the ledger was ticked last."""

    # ---- silence

    def heard(self, member: Member) -> None:
        """Its present worker has said something."""
        now_s = self._ledger.now_s
        if now_s > member.heard_s:
            member.heard_s = now_s
        if member.is_silent:
            member.is_silent = False
            self._sitting.discard(member.node)
            self._ledger.live.roll.forget()

    def tick(self) -> None:
        """Notice workers that say nothing for the job's grace: nobody waits for them, although their nodes may live.

        Silence in which the hub itself stood still is forgiven.
        """
        ledger, now_s = self._ledger, self._ledger.now_s
        absence_s = now_s - self._ticked_s
        self._ticked_s = now_s
        patience_s = max(SILENT_S, ledger.job.fault.grace_s)
        if absence_s > STOOD_STILL_S:
            for member in ledger.members.values():
                member.heard_s = min(now_s, member.heard_s + absence_s)
        for member in ledger.members.values():
            if not member.is_silent and now_s - member.heard_s <= patience_s:
                continue
            if member.is_present and not member.is_silent and now_s - member.heard_s > patience_s:
                member.is_silent = True
                ledger.live.roll.forget()
            if member.is_silent and member.is_present and ledger.samples.outstanding(member.node):
                self._sitting.add(member.node)

    def reopened(self) -> None:
        """The hub has started: nobody has been silent yet."""
        for member in self._ledger.members.values():
            member.heard_s = self._ledger.now_s + REOPENED_S

    # ---- requests

    def lease(self, member: Member, request: m.LeaseRequest) -> m.LeaseReply:
        """See RunLedger.lease. `member`: the present incarnation. Raises ConflictError, ProtocolError, StorageError."""
        ledger = self._ledger
        if request.request_id == member.last_request_id and member.last_lease is not None:
            return self._repeat(member, member.last_lease, request)
        if request.request_id < member.last_request_id:
            raise ConflictError(
                f"request {request.request_id} of {member.node} is older than its request {member.last_request_id}",
                cause="it was delayed on its way; nobody waits for its answer any more",
            )
        self._learn(member, request)
        self._give_back(member, request.returned)
        self._recover(member, request.holds)
        void = ledger.samples.not_owned(member.node, request.holds) if request.holds else []
        if ledger.is_over():
            return m.LeaseReply(status="finished", final_versions=[f.version for f in ledger.fragments], void=void)
        count = self._count(member, request)
        if count > 0:
            return self._grant(member, request.request_id, count, void)
        return m.LeaseReply(status="wait", void=void, give_back=self._surplus(member))

    def _repeat(self, member: Member, last: m.LeaseReply, request: m.LeaseRequest) -> m.LeaseReply:
        """The answer was lost: the same again, but for what has gone back meanwhile and others have now."""
        self._check(request.holds)
        self._recover(member, [*request.holds, *last.ranges])
        ranges = self._ledger.samples.owned(member.node, last.ranges)
        void = self._ledger.samples.not_owned(member.node, request.holds)
        return m.LeaseReply(status="granted", ranges=ranges, void=void)

    def _learn(self, member: Member, request: m.LeaseRequest) -> None:
        """Raises ProtocolError."""
        for ranges in (request.holds, request.returned):
            self._check(ranges)
        several = len(self._ledger.fragments) > 1
        member.unpushed = request.unpushed or (several and self._ledger.samples.outstanding(member.node) > 0)
        member.behind = [f for f in request.behind if 0 < f < len(self._ledger.fragments)]
        member.step = max(1, min(request.step, MAX_LEASE))
        member.ready, member.told_s = request.ready, self._ledger.now_s
        self._in_vain.pop(member.node, None)

    def _check(self, ranges: list[Range]) -> None:
        if not ranges:
            return
        total = self._ledger.samples.total
        if len(ranges) > MAX_RANGES or any(not 0 <= start < stop <= total for start, stop in ranges):
            raise ProtocolError(
                f"this request names samples that the run does not have (0 to {total}), or too many ranges",
                next="use the same version of ciuic on both sides",
            )

    def _count(self, member: Member, request: m.LeaseRequest) -> int:
        """How many samples it gets, whole steps while there are enough; 0: it must wait."""
        ledger = self._ledger
        if request.count <= 0:
            return 0
        if not ledger.samples.free:
            self._in_vain[member.node] = ledger.now_s
            if not self._take_from_the_silent(member):
                return 0
        count = min(request.count, MAX_LEASE, self._pool().allowance(self._holder(member)))
        return count - count % member.step if count > member.step else count

    def _grant(self, member: Member, request_id: int, count: int, void: list[Range]) -> m.LeaseReply:
        ledger, node = self._ledger, member.node
        ranges = ledger.samples.lease(node, count)
        record = Leased(node=node, incarnation=member.incarnation, request_id=request_id, ranges=tuple(ranges))
        try:
            ledger.journal.append(record)
        except StorageError:
            ledger.samples.give_back(node, ranges)
            raise
        member.last_request_id, member.unpushed = request_id, len(ledger.fragments) > 1
        member.behind = list(range(1, len(ledger.fragments)))
        member.last_lease = m.LeaseReply(status="granted", ranges=ranges, void=void)
        if member.ready >= 0:
            member.ready += sum(b - a for a, b in ranges)
        return member.last_lease

    # ---- sharing

    def _pool(self) -> Pool:
        """Counted now and then, not for each request: with N workers that would be N looks each."""
        ledger, now = self._ledger, self._counted
        free = len(ledger.samples.free)
        if (
            now is None
            or now.epoch != ledger.epoch
            or ledger.now_s - now.at_s > POOL_S
            or abs(free - now.free) > POOL_CHANGE * now.pool.left
        ):
            holders = [self._holder(x) for x in ledger.live.roll.at_work(ledger.epoch) if not x.is_silent]
            # the first to attach is not alone for long
            pool = make_pool(holders, free=free, sharers=0 if len(ledger.samples.committed) else ledger.job.nodes.min)
            now = self._counted = _Counted(pool=pool, at_s=ledger.now_s, epoch=ledger.epoch, free=free)
        return now.pool

    def _holder(self, member: Member) -> Holder:
        """With the samples that it has not started, as of now: what it said, less what it trained since."""
        ledger, report = self._ledger, member.report
        rate = member.step / report.step_s if report is not None and report.step_s > 0 else 0.0
        held = ledger.samples.leased.get(member.node)
        ready = 0.0 if held is None else float(len(held))
        if ready and member.ready >= 0:
            ready = min(ready, max(0.0, member.ready - rate * (ledger.now_s - member.told_s)))
        return Holder(ready=ready, rate=rate, step=member.step)

    def _surplus(self, member: Member) -> int:
        ledger = self._ledger
        if member.ready <= 0 or ledger.samples.free:
            return 0
        asking = [
            self._holder(other)
            for node, at_s in self._in_vain.items()
            if node != member.node
            and ledger.now_s - at_s <= ASKS_STILL_S
            and (other := ledger.members[node]).is_present
        ]
        return self._pool().surplus(self._holder(member), asking) if asking else 0

    # ---- what comes back

    def _give_back(self, member: Member, ranges: list[Range]) -> None:
        """The worker returns what it has not started."""
        back = self._ledger.samples.owned(member.node, ranges) if ranges else []
        if back:
            self._ledger.journal.append(Returned(node=member.node, ranges=tuple(back)))
            self._ledger.samples.give_back(member.node, back)

    def _take_from_the_silent(self, asker: Member) -> bool:
        """Nothing is free, and workers that say nothing any more sit on samples: others train them."""
        ledger = self._ledger
        sitting, self._sitting = self._sitting, set()
        for member in [ledger.members[node] for node in sorted(sitting)]:
            back = list(ledger.samples.leased.get(member.node, ()))
            if member is asker or not back or not member.is_present or not member.is_silent:
                continue
            ledger.journal.append(Returned(node=member.node, ranges=tuple(back), is_lost=True))
            ledger.samples.give_back(member.node, back)
            lose(member, back)
            count = sum(b - a for a, b in back)
            silence_s = ledger.now_s - member.heard_s
            text = f"the worker of {member.node} is silent for {silence_s:.0f} s: {count:,} leased samples went back"
            ledger.tell("worker.silent", text, node=member.node, data={"samples": count})
        return bool(ledger.samples.free)

    def _recover(self, member: Member, holds: Iterable[Range]) -> None:
        """It was thought lost and speaks again: what it has in hand and nobody else took is its own again."""
        if not member.lost:
            return
        again = member.lost.common(self._ledger.samples.free.common(holds))
        if again:
            self._ledger.journal.append(Recovered(node=member.node, ranges=tuple(again)))
            self._ledger.samples.restore_lease(member.node, again)
        member.lost = IntervalSet()


def lose(member: Member, ranges: Iterable[Range]) -> None:
    """These went back although the member's present worker may still hold them."""
    for start, stop in ranges:
        member.lost.add(start, stop)

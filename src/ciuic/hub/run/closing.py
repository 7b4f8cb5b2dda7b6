"""Rounds that end: what is due is closed, samples and members follow, the story is told."""

from typing import TYPE_CHECKING

from ciuic.errors import CiuicError, StorageError
from ciuic.hub.run.fragment_rounds import Closed, FragmentRounds
from ciuic.hub.run.story import round_line, snapshot_line, without
from ciuic.ledger.entry import Contributor, Push, Rejection
from ciuic.net import messages as m

if TYPE_CHECKING:
    from ciuic.hub.run.rounds import RunLedger


class Closing:
    """Of one run's ledger, under its lock."""

    def __init__(self, ledger: "RunLedger") -> None:
        self._ledger = ledger
        self._problem = ""

    def due(self) -> None:
        """Close what can be closed now."""
        with self._ledger.still():
            for fragment in self._ledger.local_fragments():
                while closed := self._try_close(fragment):
                    if closed.header.why != "pushed":
                        break

    def problem(self, what: str, error: CiuicError, *, kind: str = "storage.failed") -> None:
        """Told once, however often it is met."""
        if error.message != self._problem:
            self._problem = error.message
            self._ledger.tell(kind, f"{what}: {error}", data={"code": error.code})

    def written(self) -> None:
        """Something was written: what was told before is over."""
        if self._problem:
            self._problem = ""
            self._ledger.tell("storage.back", "files can be written again; nothing that was acknowledged was lost")

    def count_merged(self, contributor: Contributor, fragment: int) -> None:
        """A push is in an entry."""
        ledger = self._ledger
        member = ledger.member(contributor.node)
        member.pushes_merged += 1
        member.staleness = contributor.staleness
        ledger.judging.merged(contributor)
        if contributor.incarnation == member.incarnation and member.state == "warming":
            member.state = "training"
            ledger.live.roll.forget()
        if fragment == 0:
            ledger.samples.commit(contributor.ranges)

    def tell_round(self, info: m.RoundInfo, *, silent: bool = False, without: str = "") -> None:
        """The story of a round; `silent` when it was told before; `without`: whom it did without, and why."""
        if not silent:
            text, node, data = round_line(info, without)
            self._ledger.tell("round.closed", text, node=node, data=data)

    def _try_close(self, fragment: FragmentRounds) -> Closed | None:
        try:
            closed = fragment.close_next(
                self._ledger.live, lambda pushes: self._committed_with(fragment.number, pushes)
            )
        except StorageError as error:
            self.problem("round not closed", error)
            return None
        except CiuicError as error:
            self.problem("round not closed", error, kind="round.failed")
            return None
        if closed is not None:
            self.written()
            self._settle(fragment.number, closed)
        return closed

    def _committed_with(self, number: int, pushes: list[Push]) -> int:
        """Distinct samples that are committed once these pushes are."""
        committed = self._ledger.samples.committed.copy()
        if number == 0:
            for push in pushes:
                for start, stop in push.header.ranges:
                    committed.add(start, stop)
        return len(committed)

    def _settle(self, number: int, closed: Closed) -> None:
        """An entry is durable: samples and members follow."""
        ledger = self._ledger
        for rejection, push in closed.rejected:
            self._reject_waiting(rejection, push)
        for contributor in closed.header.contributors:
            self.count_merged(contributor, number)
        self.tell_round(ledger.history.closed(closed.header, closed.entry_bytes), without=without(closed))
        ledger.judging.tell(closed.header)
        if closed.snapshot_bytes:
            text, node, data = snapshot_line(number, closed)
            ledger.tell("snapshot.written", text, node=node, data=data)
        if closed.snapshot_problem:
            ledger.tell("storage.failed", f"snapshot not written: {closed.snapshot_problem}")
        ledger.wake()

    def _reject_waiting(self, rejection: Rejection, push: Push) -> None:
        """An accepted push has become too stale: its samples are its node's again, or free when that one is gone."""
        member = self._ledger.member(rejection.node)
        member.pushes_rejected += 1
        if rejection.incarnation == member.incarnation and member.is_present:
            self._ledger.samples.reject(rejection.node, push.header.ranges)
        else:
            self._ledger.samples.release(push.header.ranges)
        text = f"a push of {rejection.node} was rejected ({rejection.reason})"
        self._ledger.tell("push.rejected", text, node=rejection.node)

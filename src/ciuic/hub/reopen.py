"""Bring a run's ledger back from its files: layout, journal, then each fragment's snapshot, entries and pushes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ciuic.errors import LedgerDamagedError, ProtocolError
from ciuic.hub.fragment import Fragment
from ciuic.hub.members import Member
from ciuic.ledger.entry import Rejection
from ciuic.ledger.journal import Attached, Departed, Evaluated, Leased, Revived, Started, Switched
from ciuic.ledger.layout import Layout, layout_from_dict
from ciuic.ledger.replay import rebuild
from ciuic.ledger.samples import SampleLedger
from ciuic.net import messages as m

if TYPE_CHECKING:
    from ciuic.hub.rounds import RunLedger


def reopen(ledger: "RunLedger") -> None:
    """Fill an empty ledger object from its folder. Raises LedgerDamagedError."""
    path = ledger.folder / "layout.json"
    if path.exists():
        ledger.set_layout(_read_layout(path))
    records = ledger.journal.records()
    for record in records:
        if isinstance(record, Started):
            ledger.started, ledger.samples = True, SampleLedger(record.total_samples)
    for record in records:
        _apply(ledger, record)
    for number, fragment in enumerate(ledger.fragments):
        if fragment.store.snapshot_versions():
            _reopen_fragment(ledger, number, fragment)
    ledger.samples.find_lost()


def _read_layout(path: Path) -> Layout:
    try:
        return layout_from_dict(msgspec.json.decode(path.read_bytes()))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, ProtocolError) as error:
        raise LedgerDamagedError(
            f"{path} cannot be read",
            cause=error.message if isinstance(error, ProtocolError) else str(error),
            next="restore this file from a backup; every node of the run has the same layout",
        ) from error


def _apply(ledger: "RunLedger", record: Any) -> None:
    if isinstance(record, Evaluated):
        ledger.history.evaluated(record)
        return
    if isinstance(record, Started):
        return
    if isinstance(record, Switched):
        ledger.use(record.settings)
        return
    member = ledger.member(record.node)
    if isinstance(record, Leased):
        ledger.samples.restore_lease(record.node, record.ranges)
        member.last_request_id = record.request_id
        member.last_lease = m.LeaseReply(status="granted", ranges=list(record.ranges))
        return
    ledger.epoch += 1
    if isinstance(record, Attached):
        ledger.samples.leave(record.node, record.returned)
        member.attach(record.incarnation)
        member.totals = record.totals
    elif isinstance(record, Departed):
        ledger.samples.leave(record.node, record.returned)
        member.state = record.state
    elif isinstance(record, Revived):
        member.state = "warming"


def _reopen_fragment(ledger: "RunLedger", number: int, fragment: Fragment) -> None:
    rebuilt = rebuild(fragment.aggregator, fragment.store, ledger.run_id)
    fragment.snapshot_version = rebuilt.snapshot_version
    for header, (_, entry_bytes) in zip(rebuilt.merged, fragment.store.log.frames, strict=True):
        ledger.history.closed(header, entry_bytes)
        for contributor in header.contributors:
            ledger.count_merged(contributor, number)
            ledger.member(contributor.node).pushes_accepted += 1
        for rejection in header.rejected:
            _count_rejected(ledger.member(rejection.node), rejection, number)
    for push in rebuilt.inbox:
        ledger.take(fragment, push, late=False)
    fragment.inbox.forget_lateness()  # they all "arrived" just now


def _count_rejected(member: Member, rejection: Rejection, fragment: int) -> None:
    member.pushes_accepted += 1
    member.pushes_rejected += 1
    if rejection.incarnation == member.incarnation:
        member.last_sequence[fragment] = max(rejection.sequence, member.last_sequence.get(fragment, 0))

"""Bring a run's ledger back from its files: layout, journal, then each fragment's snapshot, entries and pushes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ciuic.errors import LedgerDamagedError, ProtocolError
from ciuic.hub.run.fragment_rounds import FragmentRounds
from ciuic.hub.run.leasing import lose
from ciuic.hub.shards.sharding import drop_folder
from ciuic.ledger.intervals import IntervalSet
from ciuic.ledger.journal import (
    Attached,
    Departed,
    Evaluated,
    Leased,
    Placed,
    Rebuilt,
    Recovered,
    Returned,
    Revived,
    Started,
    Switched,
)
from ciuic.ledger.layout import Layout, layout_from_dict
from ciuic.ledger.samples import SampleLedger
from ciuic.net import messages as m

if TYPE_CHECKING:
    from ciuic.hub.run.rounds import RunLedger


def reopen(ledger: "RunLedger") -> None:
    """Fill an empty ledger object from its folder. Raises LedgerDamagedError."""
    records = ledger.journal.records()
    for record in records:
        if isinstance(record, Started):
            ledger.started, ledger.samples = True, SampleLedger(record.total_samples)
        elif isinstance(record, Placed):
            ledger.sharding.restore(record)
    for fragment in ledger.sharding.owners:
        drop_folder(ledger.folder / f"fragment-{fragment}")  # its new owner has what was there
    path = ledger.folder / "layout.json"
    if path.exists():
        ledger.set_layout(_read_layout(path))
    for record in records:
        _apply(ledger, record)
    for fragment in ledger.local_fragments():
        _reopen_fragment(ledger, fragment)
    ledger.samples.find_lost()
    ledger.sealed = any(member.state == "done" for member in ledger.members.values())
    _tell_torn(ledger)


def _tell_torn(ledger: "RunLedger") -> None:
    """A crash in the middle of an append leaves half a record: nobody was told of it, and it is cut off."""
    logs = [("journal", ledger.journal.torn_bytes)]
    logs += [(f"log of fragment {f.number}", f.store.log.torn_bytes) for f in ledger.local_fragments()]
    for name, torn_bytes in logs:
        if torn_bytes:
            text = f"{torn_bytes:,} bytes of an unfinished record were cut off the {name}; nothing announced was in it"
            ledger.tell("ledger.torn", text, data={"bytes": torn_bytes, "log": name})


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
    if isinstance(record, Started | Placed):
        return
    if isinstance(record, Switched):
        ledger.use(record.settings)
        return
    if isinstance(record, Rebuilt):
        ledger.samples.commit(record.committed)
        ledger.samples.duplicated += record.duplicated
        return
    member = ledger.member(record.node)
    if isinstance(record, Leased):
        ledger.samples.restore_lease(record.node, record.ranges)
        member.last_request_id = record.request_id
        member.last_lease = m.LeaseReply(status="granted", ranges=list(record.ranges))
        member.unpushed = len(ledger.fragments) > 1
        return
    if isinstance(record, Returned):
        ledger.samples.give_back(record.node, record.ranges)
        lose(member, record.ranges if record.is_lost else ())
        return
    if isinstance(record, Recovered):
        ledger.samples.restore_lease(record.node, record.ranges)
        member.lost = IntervalSet()
        return
    ledger.epoch += 1
    if isinstance(record, Attached):
        ledger.samples.leave(record.node, record.returned)
        member.attach(record.incarnation)
        member.totals = record.totals
    elif isinstance(record, Departed):
        ledger.samples.leave(record.node, record.returned)
        member.state = record.state
        lose(member, record.returned)
    elif isinstance(record, Revived):
        member.state = "warming"


def _reopen_fragment(ledger: "RunLedger", fragment: FragmentRounds) -> None:
    rebuilt = fragment.reopen()
    if rebuilt is None:
        return
    for header, (_, entry_bytes) in zip(rebuilt.merged, fragment.store.log.frames, strict=True):
        ledger.history.closed(header, entry_bytes)
        for contributor in header.contributors:
            ledger.closing.count_merged(contributor, fragment.number)
            ledger.member(contributor.node).pushes_accepted += 1
        for rejection in header.rejected:
            member = ledger.member(rejection.node)
            member.pushes_accepted += 1
            member.pushes_rejected += 1
    for push in rebuilt.inbox:
        ledger.accepted(push.header)

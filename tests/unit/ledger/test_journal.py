from pathlib import Path

import msgspec
import pytest

from ciuic.errors import LedgerDamagedError
from ciuic.ledger.files import AppendLog
from ciuic.ledger.frame import build_frame
from ciuic.ledger.journal import Attached, Departed, Evaluated, Journal, Leased, Record, Revived, Started

RECORDS: list[Record] = [
    Started(total_samples=100),
    Attached(node="n0", incarnation=1),
    Leased(node="n0", incarnation=1, request_id=1, ranges=((0, 5), (9, 12))),
    Departed(node="n0", state="gone", returned=((3, 5),)),
    Revived(node="n0"),
    Attached(node="n0", incarnation=2, returned=((9, 12),), totals={"step": 4.0}),
    Evaluated(node="n0", version=3, loss=2.5, samples=64, time=1.5, samples_committed=7, final=True),
]


def test_records_are_read_in_order_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    for number, record in enumerate(RECORDS):
        journal = Journal(path)
        assert journal.records() == RECORDS[:number]
        journal.append(record)
        assert journal.records() == RECORDS[: number + 1]
        journal.close()


def test_a_record_of_another_version_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    log = AppendLog(path, "record")
    log.append(build_frame("record", msgspec.msgpack.encode({"type": "Promoted", "node": "n0"})))
    log.close()
    journal = Journal(path)
    with pytest.raises(LedgerDamagedError, match="another version"):
        journal.records()
    journal.close()

"""The audit log: who did what, from where, with what result. Append-only and durable.

Rows are only ever added: the table itself refuses changes, and each row carries a digest over itself and the row before
it, so a row that was changed or taken out behind the hub's back is found. Requests of strangers are counted and summed
up in one row per `SUMMARY_S`: however many there are, they cannot fill the disk.
"""

import hashlib
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from ciuic.hub.keeping.database import Database

SUMMARY_S = 300.0
ADDRESSES_COUNTED = 256
"""Addresses told apart between two summaries; further ones are counted together."""
ADDRESSES_TOLD = 5
OTHERS = "other addresses"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, who TEXT NOT NULL, role TEXT NOT NULL,
    serial TEXT NOT NULL, address TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL, result TEXT NOT NULL,
    detail TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE TRIGGER IF NOT EXISTS audit_is_not_changed BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER IF NOT EXISTS audit_is_not_deleted BEFORE DELETE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
"""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one action when it is recorded."""

    action: str
    """join, token.create, run.submit, run.stop, node.evict, revoke, run.sync, shards.move, hub.backup ..."""
    who: str = ""
    """Name in the caller's certificate; of a join: the name that was given. Empty: nobody with a certificate."""
    role: str = ""
    serial: str = ""
    """Of the caller's certificate."""
    address: str = ""
    target: str = ""
    result: str = "done"
    """`done`, or the code of the error."""
    detail: str = ""


class AuditLine(AuditRow, frozen=True, kw_only=True):
    """A row as it is kept."""

    id: int
    time: float
    digest: str


class AuditTrail:
    """Thread-safe."""

    def __init__(self, database: Database, *, wall_s: Callable[[], float] = time.time) -> None:
        """Makes the table when it is not there. Raises StorageError."""
        self._database, self._wall_s = database, wall_s
        self._lock = threading.Lock()
        self._refused: Counter[tuple[str, int]] = Counter()
        self._refused_since_s: float | None = None
        with database.writing() as db:
            for statement in _statements(_SCHEMA):
                db.execute(statement)
        rows = database.read("SELECT digest FROM audit ORDER BY id DESC LIMIT 1")
        self._last = str(rows[0]["digest"]) if rows else ""

    def record(self, row: AuditRow) -> None:
        """Durable when it returns. Raises StorageError."""
        with self._lock:
            moment_s = self._wall_s()
            digest = _digest(self._last, moment_s, row)
            with self._database.writing() as db:
                _insert(db, row, moment_s, digest)
            self._last = digest

    def refused(self, address: str, status: int) -> None:
        """A request was turned away; counted in memory only."""
        with self._lock:
            key = (address, status)
            if key not in self._refused and len(self._refused) >= ADDRESSES_COUNTED:
                key = (OTHERS, status)
            self._refused[key] += 1
            if self._refused_since_s is None:
                self._refused_since_s = self._wall_s()

    def sum_up(self, *, now: bool = False) -> None:
        """One row for what was refused since the last one, when that was long enough ago. Raises StorageError."""
        with self._lock:
            since_s = self._refused_since_s
            if since_s is None or not (now or self._wall_s() - since_s >= SUMMARY_S):
                return
            counts, self._refused, self._refused_since_s = self._refused, Counter(), None
        span_s = max(0.0, self._wall_s() - since_s)
        self.record(AuditRow(action="requests.refused", result="refused", detail=_summary(counts, span_s)))

    def lines(self, *, since_s: float = 0.0, after: int = 0, limit: int = 1000) -> list[AuditLine]:
        """Rows from this moment (seconds since 1970) on, with larger ids than `after`, oldest first."""
        rows = self._database.read(
            "SELECT * FROM audit WHERE time >= ? AND id > ? ORDER BY id LIMIT ?", (since_s, after, limit)
        )
        return [AuditLine(**dict(row)) for row in rows]

    def first_broken(self) -> int | None:
        """Id of the first row that does not follow the one before it; None when the whole log is as it was written."""
        before, after = "", 0
        while lines := self.lines(after=after):
            for line in lines:
                row = AuditRow(**{name: getattr(line, name) for name in AuditRow.__struct_fields__})
                if _digest(before, line.time, row) != line.digest:
                    return line.id
                before, after = line.digest, line.id
        return None


def _statements(script: str) -> list[str]:
    """Statements one by one: `executescript` would end the transaction."""
    found, open_text = [], ""
    for part in script.split(";"):
        open_text += part + ";"
        if sqlite3.complete_statement(open_text):
            found.append(open_text)
            open_text = ""
    return found


def _digest(before: str, moment_s: float, row: AuditRow) -> str:
    body = msgspec.json.encode([before, moment_s, row])
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _insert(db: sqlite3.Connection, row: AuditRow, moment_s: float, digest: str) -> None:
    values = (row.who, row.role, row.serial, row.address, row.action, row.target, row.result, row.detail)
    db.execute(
        "INSERT INTO audit (time, who, role, serial, address, action, target, result, detail, digest)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (moment_s, *values, digest),
    )


def _summary(counts: Counter[tuple[str, int]], span_s: float) -> str:
    by_status: Counter[int] = Counter()
    by_address: Counter[str] = Counter()
    for (address, status), count in counts.items():
        by_status[status] += count
        by_address[address] += count
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(by_status.items()))
    told = ", ".join(f"{address} ({count})" for address, count in by_address.most_common(ADDRESSES_TOLD))
    more = len(by_address) - ADDRESSES_TOLD
    return f"{statuses} in {span_s:.0f} s, from {told}" + (f" and {more} more" if more > 0 else "")

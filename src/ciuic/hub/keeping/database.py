"""One SQLite file, opened so that what was committed survives a crash: WAL, synchronous = FULL, one writer."""

import sqlite3
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ciuic.errors import StorageError

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE tokens (
    token_id TEXT PRIMARY KEY, secret_sha256 BLOB NOT NULL, role TEXT NOT NULL,
    uses_left INTEGER NOT NULL, created_at REAL NOT NULL, expires_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE joins (
    token_id TEXT NOT NULL, request_sha256 BLOB NOT NULL, name TEXT NOT NULL, certificate_pem TEXT NOT NULL,
    PRIMARY KEY (token_id, request_sha256)
) WITHOUT ROWID;
CREATE TABLE nodes (
    node_id TEXT PRIMARY KEY, number INTEGER NOT NULL, location TEXT NOT NULL, presence TEXT NOT NULL, row TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY, number INTEGER NOT NULL, state TEXT NOT NULL, submit_token TEXT, row TEXT NOT NULL,
    last_info TEXT
) WITHOUT ROWID;
CREATE UNIQUE INDEX runs_by_submit_token ON runs (submit_token) WHERE submit_token IS NOT NULL;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, kind TEXT NOT NULL, run_id TEXT NOT NULL,
    node_id TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL
);
CREATE INDEX events_by_run ON events (run_id, id);
CREATE TABLE logs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, node_id TEXT NOT NULL, time REAL NOT NULL,
    rank INTEGER NOT NULL, stream TEXT NOT NULL, text TEXT NOT NULL
);
CREATE INDEX logs_by_run ON logs (run_id, id);
"""


class Database:
    """Thread-safe: one connection writes behind a lock, another reads behind its own (WAL lets them overlap)."""

    def __init__(self, path: Path) -> None:
        """Open or create. Raises StorageError, also for a file of a newer version."""
        self.path = path
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        with explained(path):
            self._writer = _connect(path)
            self._reader = _connect(path)
            self._prepare()

    def close(self) -> None:
        """Close both connections; waits for a write in progress."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()

    @contextmanager
    def writing(self) -> Generator[sqlite3.Connection]:
        """One transaction: durable when the block has ended, undone when it raises. Raises StorageError."""
        with self._write_lock, explained(self.path):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:  # whatever it was: half a transaction must not stay open
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def read(self, sql: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """Rows of one query. Raises StorageError."""
        with self._read_lock, explained(self.path):
            return self._reader.execute(sql, values).fetchall()

    def _prepare(self) -> None:
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"{self.path} was written by a newer version of ciuic",
                cause=f"its format is {version}, this version knows {SCHEMA_VERSION}",
                next="install the newer version again",
            )
        if version < SCHEMA_VERSION:
            self._writer.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


@contextmanager
def explained(path: Path) -> Generator[None]:
    """Turn SQLite's errors into a StorageError that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        full = "full" in str(error)
        next_ = "free some space; the hub goes on by itself" if full else "check the disk and its permissions"
        raise StorageError(f"the hub cannot use {path}", cause=str(error), next=next_) from error

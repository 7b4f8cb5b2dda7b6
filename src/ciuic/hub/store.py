"""What the hub keeps in SQLite: nodes, runs, events, logs. (Tokens: hub/tokens.py. Model state: the ledger's files.)

Heartbeats are never written. Everything is committed before it is announced in an answer.
"""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ciuic.errors import StorageError
from ciuic.hub.database import Database
from ciuic.hub.records import Announce, Node, Run
from ciuic.net.messages import Event, LogLine

PRUNE_EVERY = 256
"""Written events or log lines between two looks at the retention cap."""


class StoredLine(msgspec.Struct, frozen=True, kw_only=True):
    """One log line of a run as it is streamed to people."""

    id: int
    node_id: str
    time: float
    rank: int
    stream: str
    text: str


class Store:
    """Rows in, rows out; no decisions. Thread-safe."""

    def __init__(self, path: Path, *, events_kept: int = 20_000, log_lines_kept: int = 50_000) -> None:
        """Open or create the file. Raises StorageError."""
        self.database = Database(path)
        self._events_kept = events_kept
        self._log_lines_kept = log_lines_kept
        self._events_since_prune = 0
        self._lines_since_prune: dict[str, int] = {}

    def close(self) -> None:
        self.database.close()

    # ---- start -----------------------------------------------------------------------------------------------------

    def count_boot(self) -> int:
        """How often a hub has been started on this file, this time included."""
        with self.database.writing() as db:
            return _bump(db, "boots")

    def epoch(self) -> int:
        """The membership epoch that was stored last."""
        rows = self.database.read("SELECT value FROM meta WHERE key = 'epoch'")
        return int(rows[0]["value"]) if rows else 0

    def nodes(self) -> list[Node]:
        """Every node, in order of joining."""
        rows = self.database.read("SELECT row FROM nodes ORDER BY number")
        return [_decoded(row["row"], Node, self.database.path) for row in rows]

    def runs(self) -> list[Run]:
        """Every run, in order of submission."""
        rows = self.database.read("SELECT row FROM runs ORDER BY number")
        return [_decoded(row["row"], Run, self.database.path) for row in rows]

    def runs_without_info(self) -> list[str]:
        """Runs that ended just before a crash: what they reported last was not kept yet."""
        states = "('finished', 'stopped', 'failed')"
        rows = self.database.read(f"SELECT run_id FROM runs WHERE last_info IS NULL AND state IN {states}")
        return [row["run_id"] for row in rows]

    # ---- changes ---------------------------------------------------------------------------------------------------

    def commit(
        self,
        *,
        wall_s: float,
        nodes: Iterable[Node] = (),
        runs: Iterable[Run] = (),
        epoch: int | None = None,
        lines: Sequence[Announce] = (),
        also: Callable[[sqlite3.Connection], None] | None = None,
    ) -> list[Event]:
        """Store rows, epoch and story lines (and what `also` writes) in one transaction; returns the lines with ids."""
        with self.database.writing() as db:
            if also is not None:
                also(db)
            for node in nodes:
                put_node(db, node)
            for run in runs:
                put_run(db, run)
            if epoch is not None:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (epoch,))
            events = [put_event(db, line, wall_s) for line in lines]
        self._prune_events(len(events))
        return events

    def save_info(self, run_id: str, info: bytes) -> None:
        """Keep what a run reported last (JSON), for when its ledger is closed."""
        with self.database.writing() as db:
            db.execute("UPDATE runs SET last_info = ? WHERE run_id = ?", (info.decode(), run_id))

    def last_info(self, run_id: str) -> dict[str, Any]:
        """What `save_info` kept; empty when nothing."""
        rows = self.database.read("SELECT last_info FROM runs WHERE run_id = ?", (run_id,))
        if not rows or rows[0]["last_info"] is None:
            return {}
        return _decoded(rows[0]["last_info"], dict[str, Any], self.database.path)

    # ---- the story -------------------------------------------------------------------------------------------------

    def events_after(self, after: int, *, run_id: str = "", limit: int = 1000) -> list[Event]:
        """Events with a larger id, oldest first."""
        where, values = ("AND run_id = ?", (after, run_id, limit)) if run_id else ("", (after, limit))
        rows = self.database.read(f"SELECT * FROM events WHERE id > ? {where} ORDER BY id LIMIT ?", values)
        return [_event(row) for row in rows]

    def latest_events(self, count: int) -> list[Event]:
        """The last `count` events, oldest first."""
        rows = self.database.read("SELECT * FROM events ORDER BY id DESC LIMIT ?", (count,))
        return [_event(row) for row in reversed(rows)]

    def _prune_events(self, added: int) -> None:
        self._events_since_prune += added
        if self._events_since_prune < PRUNE_EVERY:
            return
        self._events_since_prune = 0
        with self.database.writing() as db:
            db.execute("DELETE FROM events WHERE id <= (SELECT MAX(id) FROM events) - ?", (self._events_kept,))

    # ---- logs ------------------------------------------------------------------------------------------------------

    def add_lines(self, run_id: str, node_id: str, lines: Sequence[LogLine]) -> None:
        """Append log lines of one node; the oldest of the run beyond the cap are dropped."""
        rows = [(run_id, node_id, line.time, line.rank, line.stream, line.text) for line in lines]
        with self.database.writing() as db:
            db.executemany(
                "INSERT INTO logs (run_id, node_id, time, rank, stream, text) VALUES (?, ?, ?, ?, ?, ?)", rows
            )
            count = self._lines_since_prune.get(run_id, PRUNE_EVERY) + len(rows)
            if count >= PRUNE_EVERY:
                count = 0
                oldest_kept = "SELECT id FROM logs WHERE run_id = ? ORDER BY id DESC LIMIT 1 OFFSET ?"
                db.execute(
                    f"DELETE FROM logs WHERE run_id = ? AND id < ({oldest_kept})",
                    (run_id, run_id, self._log_lines_kept - 1),
                )
        self._lines_since_prune[run_id] = count

    def lines_after(self, run_id: str, after: int, *, node_id: str = "", limit: int = 1000) -> list[StoredLine]:
        """Log lines of a run with a larger id, oldest first."""
        where = "AND node_id = ?" if node_id else ""
        values = (run_id, after, *((node_id,) if node_id else ()), limit)
        rows = self.database.read(
            f"SELECT * FROM logs WHERE run_id = ? AND id > ? {where} ORDER BY id LIMIT ?",
            values,
        )
        return [
            StoredLine(
                id=row["id"],
                node_id=row["node_id"],
                time=row["time"],
                rank=row["rank"],
                stream=row["stream"],
                text=row["text"],
            )
            for row in rows
        ]


# ---- pieces --------------------------------------------------------------------------------------------------------


def put_node(db: sqlite3.Connection, node: Node) -> None:
    """Inside a transaction: the node's row."""
    db.execute(
        "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?)",
        (node.node_id, node.number, node.location, node.presence, msgspec.json.encode(node).decode()),
    )


def put_run(db: sqlite3.Connection, run: Run) -> None:
    """Inside a transaction: the run's row; what it reported last stays."""
    db.execute(
        "INSERT INTO runs (run_id, number, state, submit_token, row) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (run_id) DO UPDATE SET state = excluded.state, row = excluded.row",
        (run.run_id, run.number, run.state, run.submit_token or None, msgspec.json.encode(run).decode()),
    )


def put_event(db: sqlite3.Connection, line: Announce, wall_s: float) -> Event:
    """Inside a transaction: one line of the story."""
    cursor = db.execute(
        "INSERT INTO events (time, kind, run_id, node_id, text, data) VALUES (?, ?, ?, ?, ?, ?)",
        (wall_s, line.kind, line.run_id, line.node_id, line.text, msgspec.json.encode(line.data).decode()),
    )
    return Event(
        id=cursor.lastrowid or 0,
        time=wall_s,
        kind=line.kind,
        run_id=line.run_id,
        node_id=line.node_id,
        text=line.text,
        data=line.data,
    )


def _bump(db: sqlite3.Connection, key: str) -> int:
    db.execute("INSERT INTO meta VALUES (?, 1) ON CONFLICT (key) DO UPDATE SET value = value + 1", (key,))
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()["value"])


def _event(row: sqlite3.Row) -> Event:
    return Event(
        id=row["id"],
        time=row["time"],
        kind=row["kind"],
        run_id=row["run_id"],
        node_id=row["node_id"],
        text=row["text"],
        data=msgspec.json.decode(row["data"]),
    )


def _decoded(text: str, kind: Any, path: Path) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise StorageError(f"{path} holds a row that cannot be read", cause=str(error)) from error

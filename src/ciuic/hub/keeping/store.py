"""What the hub keeps in SQLite: nodes, runs, events, logs. (Tokens: access.tokens. Model state: the ledger's files.)

Heartbeats are never written. Everything is committed before it is announced in an answer.
"""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ciuic.errors import StorageError
from ciuic.hub.keeping.database import Database
from ciuic.hub.membership.records import Announce, Node, Run
from ciuic.net.messages import Event, LogLine

PRUNE_EVERY = 256
"""Written events or log lines between two looks at the retention cap."""


OPEN = "(SELECT run_id FROM runs WHERE state IN ('waiting', 'running', 'stopping'))"
"""SQL: the runs of which nothing is ever dropped."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which events somebody asks for; what is left empty does not matter."""

    run_id: str = ""
    with_hub: bool = False
    """Of `run_id`: also what happened to the hub meanwhile; of a run that has ended until its last event."""
    kinds: tuple[str, ...] = ()
    """`node.dead`, or `node` for all that begin with `node.`."""
    node_id: str = ""
    since: float = 0.0
    """Seconds since 1970."""

    def where(self) -> tuple[str, list[object]]:
        """The same in SQL: conditions that follow another one, and their values."""
        parts: list[str] = []
        values: list[object] = []
        if self.run_id and self.with_hub:
            parts.append(f"(run_id = ? OR (run_id = '' AND {_ABOUT_HUB} AND {_DURING_RUN}))")
            values += [self.run_id] * 4
        elif self.run_id:
            parts.append("run_id = ?")
            values.append(self.run_id)
        if self.kinds:
            parts.append("(" + " OR ".join(["kind = ? OR kind GLOB ?"] * len(self.kinds)) + ")")
            values += [value for kind in self.kinds for value in (kind, f"{_plain(kind)}.*")]
        if self.node_id:
            parts.append("node_id = ?")
            values.append(self.node_id)
        if self.since:
            parts.append("time >= ?")
            values.append(self.since)
        return "".join(f" AND {part}" for part in parts), values


_ABOUT_HUB = "(kind GLOB 'hub.*' OR kind GLOB 'storage.*')"
_DURING_RUN = (
    "id > (SELECT MIN(id) FROM events WHERE run_id = ?)"
    " AND (id < (SELECT MAX(id) FROM events WHERE run_id = ?)"
    f" OR ? IN {OPEN})"
)


def _plain(kind: str) -> str:
    return "".join(letter for letter in kind if letter.isalnum() or letter in "._-")


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

    def last_number(self) -> int:
        """No run may have this number or a smaller one again: runs with them were removed, or another hub made them."""
        rows = self.database.read("SELECT value FROM meta WHERE key = 'last_number'")
        return int(rows[0]["value"]) if rows else 0

    def go_on_from(self, distance: int) -> None:
        """Numbers of runs, events and log lines that a lost hub may have given out are not given out again."""
        with self.database.writing() as db:
            highest = db.execute("SELECT MAX(number) FROM runs").fetchone()[0] or 0
            _raise_number(db, highest + distance)
            for table in ("events", "logs"):
                top = db.execute(f"SELECT MAX(id) FROM {table}").fetchone()[0] or 0
                db.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
                db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, top + distance))

    def remove_run(self, run: Run, line: Announce, wall_s: float) -> list[Event]:
        """Forget a run but for its events; its number stays taken."""
        with self.database.writing() as db:
            db.execute("DELETE FROM runs WHERE run_id = ?", (run.run_id,))
            db.execute("DELETE FROM logs WHERE run_id = ?", (run.run_id,))
            _raise_number(db, run.number)
            return [put_event(db, line, wall_s)]

    def drop_old(self, *, events_before: float, logs_before: float) -> tuple[int, int]:
        """Events and log lines older than these moments, but none of an open run; how many of each."""
        with self.database.writing() as db:
            old = f"time < ? AND run_id NOT IN {OPEN}"
            events = db.execute(f"DELETE FROM events WHERE {old}", (events_before,)).rowcount
            lines = db.execute(f"DELETE FROM logs WHERE {old}", (logs_before,)).rowcount
        return events, lines

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

    def events_after(self, after: int, *, wanted: Wanted | None = None, limit: int = 1000) -> list[Event]:
        """Events with a larger id, oldest first."""
        where, values = (wanted or Wanted()).where()
        sql = f"SELECT * FROM events WHERE id > ?{where} ORDER BY id LIMIT ?"
        return [_event(row) for row in self.database.read(sql, [after, *values, limit])]

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
            oldest_kept = "(SELECT MAX(id) FROM events) - ?"
            db.execute(f"DELETE FROM events WHERE id <= {oldest_kept} AND run_id NOT IN {OPEN}", (self._events_kept,))

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


def _raise_number(db: sqlite3.Connection, number: int) -> None:
    db.execute(
        "INSERT INTO meta VALUES ('last_number', ?) ON CONFLICT (key) DO UPDATE SET value = MAX(value, excluded.value)",
        (number,),
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

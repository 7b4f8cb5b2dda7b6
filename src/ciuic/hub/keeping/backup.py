"""A consistent copy of a hub's folder, while it works or from its files: database, ledgers, authority.

The database is copied first (VACUUM INTO: one transaction), then each run it names, at one moment of that run: nothing
of it is written while its files get a second name (a hard link). Logs only grow, so their length at that moment is all
that must be remembered; the rest is read at leisure while the run goes on. So a ledger is never older than its run's
row, and every push that was acknowledged before the backup began is in it: in an entry, or as a file.
"""

import re
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ciuic.errors import ConflictError, StorageError
from ciuic.hub.keeping.database import explained
from ciuic.hub.membership.records import Run
from ciuic.ledger.archive import Item, archive_pieces, file_item
from ciuic.ledger.files import storage_error

KIND = "ciuic-backup-1"
STAGING = ".backup-"
ALLOWED = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,127}/){0,5}[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
"""Names in a backup: plain, below its folder."""
AUTHORITY_KEY = "authority.key"
_AUTHORITY = ("authority.pem", AUTHORITY_KEY)
_LEFT_OUT = ("lock", "address", "alive", "hub.pem", "hub.key", "ciuic.db", "ciuic.db-wal", "ciuic.db-shm")
"""Made again at the next start, or copied in another way."""
Still = Callable[[str], AbstractContextManager[Any]]
"""By run: while it is held, no file of that run changes."""


@dataclass(kw_only=True)
class Capture:
    """What a backup holds, under names that nothing else touches."""

    staging: Path
    items: list[Item] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Before compression."""
        return sum(item.size_bytes for item in self.items)

    def pieces(self) -> Generator[bytes]:
        """The archive; the second names go when it has ended, however it ends."""
        try:
            yield from archive_pieces(KIND, self.facts, self.items)
        finally:
            self.drop()

    def drop(self) -> None:
        """Take the second names away."""
        shutil.rmtree(self.staging, ignore_errors=True)


def capture(folder: Path, *, still: Still | None = None, with_authority: bool = True) -> Capture:
    """Take hold of everything in a hub's folder. `still` of the running hub; None: nobody else uses the folder.

    Raises StorageError, and then nothing stays behind.
    """
    found = Capture(staging=folder / f"{STAGING}{secrets.token_hex(4)}")
    try:
        found.staging.mkdir(mode=0o700)
        _copy_database(folder / "ciuic.db", found.staging / "ciuic.db")
        found.items.append(file_item("ciuic.db", found.staging / "ciuic.db"))
        runs = _runs(found.staging / "ciuic.db")
        for path in sorted(folder.iterdir()):
            is_wanted = path.name not in _LEFT_OUT and (with_authority or path.name not in _AUTHORITY)
            if path.is_file() and is_wanted and not path.name.startswith("."):
                _take(found, path, path.name)
        away = {}
        for run in runs:
            with still(run.run_id) if still is not None else nullcontext():
                missing = _take_run(found, folder / "runs" / run.run_id, run.run_id)
            if missing:
                away[run.run_id] = missing
        found.facts = {
            "runs": [{"run_id": run.run_id, "state": run.state} for run in runs],
            "with_authority": with_authority,
            "elsewhere": away,
        }
    except OSError as error:
        found.drop()
        raise storage_error(f"cannot make a backup of {folder}", error) from error
    except BaseException:
        found.drop()
        raise
    return found


def drop_leftovers(folder: Path) -> None:
    """Remove what a backup left behind that a crash has ended."""
    for path in folder.glob(f"{STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _copy_database(path: Path, to: Path) -> None:
    if not path.exists():
        raise StorageError(f"there is no hub in {path.parent}", cause=f"{path.name} is missing")
    with explained(path), closing(sqlite3.connect(path, timeout=30.0, isolation_level=None)) as database:
        database.execute("VACUUM INTO ?", (str(to),))
    to.chmod(0o600)


def _runs(path: Path) -> list[Run]:
    with explained(path), closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT row FROM runs ORDER BY number").fetchall()
    try:
        return [msgspec.json.decode(row, type=Run) for (row,) in rows]
    except msgspec.DecodeError as error:
        raise StorageError(f"{path} holds a run that cannot be read", cause=str(error)) from error


def _take_run(found: Capture, folder: Path, run_id: str) -> list[int]:
    """Second names for all files of a run; returns the fragments that are not here (shards serve them)."""
    if not folder.is_dir():
        return []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            _take(found, path, f"runs/{run_id}/{path.relative_to(folder).as_posix()}")
    if not (folder / "layout.json").exists():
        return []
    count = msgspec.json.decode((folder / "layout.json").read_bytes()).get("fragment_count", 1)
    return [number for number in range(count) if not (folder / f"fragment-{number}").is_dir()]


def _take(found: Capture, path: Path, name: str) -> None:
    """Give a file a second name and remember its length now."""
    if not ALLOWED.fullmatch(name):
        raise ConflictError(
            f"{path} cannot be in a backup", cause="its name is not one of the hub's", next="move it away"
        )
    second = found.staging / name
    second.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        second.hardlink_to(path)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, second)
    found.items.append(file_item(name, second))

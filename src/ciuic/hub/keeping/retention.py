"""What a hub forgets, and when: old events, old log lines, the logs of runs that finished long ago.

Nothing of a run that is not over is ever touched. Of a finished run the newest snapshot stays, at its last version;
only `ciuic hub rm` takes that away too.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from ciuic.errors import LedgerDamagedError
from ciuic.hub.keeping.restore import opened
from ciuic.hub.keeping.store import Store
from ciuic.hub.membership.records import Run
from ciuic.ledger.files import storage_error
from ciuic.net.keeping_messages import Collected, DiskUse

DAY_S = 86400.0
USE_KNOWN_S = 20.0
"""How long a measured disk use is told again before it is measured anew."""
_log = structlog.get_logger("ciuic.hub")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """How long things are kept, in seconds."""

    events_s: float = 90 * DAY_S
    logs_s: float = 30 * DAY_S
    ledgers_s: float = 30 * DAY_S
    """The entries and pushes of a finished run, counted from its end."""


def collect(folder: Path, store: Store, keep: Keep, wall_s: float) -> Collected:
    """Forget what is older than that. Raises StorageError."""
    before = folder_bytes(folder)
    events, lines = store.drop_old(events_before=wall_s - keep.events_s, logs_before=wall_s - keep.logs_s)
    thinned = []
    for run in store.runs():
        is_old = run.state == "finished" and run.ended_at is not None and wall_s - run.ended_at >= keep.ledgers_s
        place = folder / "runs" / run.run_id
        if is_old and any(place.glob("fragment-*/log.bin")) and store.last_info(run.run_id):
            try:
                thin(place, run)
                thinned.append(run.run_id)
            except LedgerDamagedError as error:  # left as it is, for a person to look at
                _log.warning("a finished ledger is damaged and was left alone", run=run.run_id, error=str(error))
    return Collected(events=events, log_lines=lines, ledgers=thinned, freed_bytes=max(0, before - folder_bytes(folder)))


def thin(folder: Path, run: Run) -> None:
    """Leave of a finished run its journal and one snapshot per fragment, at its last version.

    Raises LedgerDamagedError when its files do not replay; nothing was removed then.
    """
    with opened(folder, run) as ledger:
        for fragment in ledger.local_fragments():
            if fragment.snapshot_version < fragment.version:
                fragment.store.save_snapshot(fragment.aggregator.snapshot(run.run_id))
        kept = {f.folder: f.store.snapshot_path(f.version) for f in ledger.local_fragments()}
    try:
        for place, snapshot in kept.items():
            for path in [*(place / "snapshots").iterdir(), *(place / "pushes").iterdir(), place / "log.bin"]:
                if path != snapshot:
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(f"cannot tidy {folder}", error) from error


def remove(folder: Path, run_id: str) -> int:
    """All files of a run; how many bytes they had. Raises StorageError."""
    place = folder / "runs" / run_id
    size = folder_bytes(place)
    gone = place.with_name(f".{run_id}.removed")
    try:
        if place.exists():
            shutil.rmtree(gone, ignore_errors=True)
            place.rename(gone)  # at once, so that half a run is never taken for a whole one
        shutil.rmtree(gone, ignore_errors=True)
    except OSError as error:
        raise storage_error(f"cannot remove {place}", error) from error
    return size


# ---- how much is used ----------------------------------------------------------------------------------------------


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below; files that go meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


class DiskMeter:
    """Measures the hub's disk use, at most every few seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._known: DiskUse | None = None
        self._at_s = 0.0

    def use(self) -> DiskUse:
        """By the database, and by each run."""
        now_s = self._clock()
        if self._known is None or now_s - self._at_s > USE_KNOWN_S:
            self._known, self._at_s = self._measured(), now_s
        return self._known

    def _measured(self) -> DiskUse:
        runs: dict[str, int] = {}
        if (self._folder / "runs").is_dir():
            runs = {path.name: folder_bytes(path) for path in (self._folder / "runs").iterdir() if path.is_dir()}
        database = sum(path.stat().st_size for path in self._folder.glob("ciuic.db*"))
        return DiskUse(database_bytes=database, runs=runs)

"""A hub's folder from a backup: unpack, replay every ledger, and make sure that nobody takes it for the hub it was.

Workers of the lost hub may be ahead of the copy. After a restore every node's present worker is from another history:
its incarnation is not accepted any more, and its run has a new attempt, so its agent starts a fresh worker, which
loads a snapshot. Samples that were leased at the time of the backup are free again; what merged after it is trained
again, because the copy does not hold it.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ciuic.errors import ConflictError, LedgerDamagedError, UsageError
from ciuic.hub.keeping.backup import ALLOWED, AUTHORITY_KEY, KIND
from ciuic.hub.keeping.store import Store
from ciuic.hub.membership.records import OPEN_RUN, Announce, Run
from ciuic.hub.run.rounds import RunLedger
from ciuic.job import parse_job
from ciuic.ledger.archive import About, Folder, read_archive
from ciuic.ledger.journal import Attached, Departed
from ciuic.net.tls import Authority

PART = ".restoring"
FENCE = 1000
"""Incarnations, attempts and numbers go on so much higher: nothing that the lost hub gave out is given out again."""
SPARE_BYTES = 64 << 20
"""Disk that stays free."""


@dataclass(frozen=True, kw_only=True)
class RestoredRun:
    """One run as it came out of its files."""

    run_id: str
    state: str
    versions: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Of its fragments here; each came out of the snapshot and the pushes again."""
    committed: int = 0
    total: int = 0
    elsewhere: list[int] = field(default_factory=list)
    """Fragments that shards serve: they are not in the backup."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `restore` has done."""

    folder: Path
    made_at: float
    with_authority: bool
    runs: list[RestoredRun]


def restore(path: Path, home: Path) -> Restored:
    """Put a backup into `home`, which must be empty, or not be there. On an error `home` is as it was.

    Raises UsageError, FrameError for a damaged file, StorageError, LedgerDamagedError.
    """
    if home.exists() and any(home.iterdir()):
        raise UsageError(
            f"{home} is not empty", cause="a hub is restored into an empty folder only", next="name another folder"
        )
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = home / PART
    try:
        sink = Folder(part, shutil.disk_usage(home).free - SPARE_BYTES)
        about = read_archive(path, KIND, ALLOWED, sink)
        sink.close()
        runs = _revive(part, about)
        if about.facts.get("with_authority"):
            Authority.load(part)
        part.rename(home / "hub")
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Restored(
        folder=home / "hub", made_at=about.made_at, with_authority=(home / "hub" / AUTHORITY_KEY).exists(), runs=runs
    )


def _revive(folder: Path, about: About) -> list[RestoredRun]:
    """Replay all ledgers and fence off the workers of the lost hub."""
    store = Store(folder / "ciuic.db")
    try:
        elsewhere = about.facts.get("elsewhere", {})
        found = [_replayed(folder, run, elsewhere.get(run.run_id, [])) for run in store.runs()]
        runs = [run for run in store.runs() if run.state in OPEN_RUN]
        for run in runs:
            run.attempt += FENCE
        nodes = store.nodes()
        for node in nodes:
            node.revision += FENCE
        day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.made_at))
        text = f"the hub was restored from a backup of {day}; what happened after that is not in it"
        line = Announce(kind="hub.restored", text=text, data={"made_at": about.made_at})
        store.go_on_from(FENCE)
        store.commit(wall_s=time.time(), nodes=nodes, runs=runs, epoch=store.epoch() + FENCE, lines=[line])
    finally:
        store.close()
    return found


def _replayed(folder: Path, run: Run, elsewhere: list[int]) -> RestoredRun:
    place = folder / "runs" / run.run_id
    if not (place / "layout.json").exists():
        return RestoredRun(run_id=run.run_id, state=run.state)
    if not (place / "fragment-0" / "log.bin").exists():
        return RestoredRun(run_id=run.run_id, state=run.state)  # only its last snapshot was kept
    with opened(place, run) as ledger:
        if run.state != "finished":
            fence(ledger)
        info = ledger.info(full=False)
        here = [fragment.number for fragment in ledger.local_fragments()]
        return RestoredRun(
            run_id=run.run_id,
            state=run.state,
            versions=[info["versions"][number] for number in here],
            digests=[info["digests"][number] for number in here],
            committed=info["samples"].committed,
            total=info["samples"].total,
            elsewhere=list(elsewhere),
        )


@contextmanager
def opened(folder: Path, run: Run) -> Iterator[RunLedger]:
    """A ledger outside a hub: replayed, silent, and closed again. Raises LedgerDamagedError."""

    def emit(kind: str, text: str, node: str, data: dict[str, Any]) -> None:
        """Nobody listens."""

    try:
        ledger = RunLedger.open(
            folder, parse_job(run.job), run_id=run.run_id, clock=time.monotonic, emit=emit, wake=lambda: None
        )
    except ConflictError as error:
        raise LedgerDamagedError(f"the ledger of {run.run_id} cannot be read", cause=error.message) from error
    try:
        yield ledger
    finally:
        ledger.close()


def fence(ledger: RunLedger) -> None:
    """Every worker that had a place has lost it, and its unpushed samples are free. Raises StorageError."""
    for name, member in sorted(ledger.members.items()):
        returned = tuple(ledger.samples.give_back(name))
        incarnation = member.incarnation + FENCE
        ledger.journal.append(Attached(node=name, incarnation=incarnation, returned=returned, totals=member.summed()))
        ledger.journal.append(Departed(node=name, state="gone"))


def summary(restored: Restored) -> dict[str, Any]:
    """The same for `--json`."""
    return msgspec.to_builtins(
        {
            "folder": str(restored.folder),
            "made_at": restored.made_at,
            "with_authority": restored.with_authority,
            "runs": [msgspec.to_builtins(run) for run in restored.runs],
        }
    )

"""A run's ledger from a node's copy of it: the same version, digest and committed samples, in a new folder.

The new log is empty: the ledger begins at the copy's version. What only the lost hub knew starts anew, and is told:
the residual of its compression and the outer momentum are zero, pushes that had not merged are not there.
"""

import re
import shutil
from pathlib import Path

import msgspec
import numpy as np

from ciuic.errors import CiuicError, FrameError, LedgerDamagedError, NotFoundError
from ciuic.hub.keeping.restore import FENCE
from ciuic.hub.run.fragment_rounds import FragmentRounds, Ground
from ciuic.hub.run.settings_source import settings_of
from ciuic.job import Job, parse_job
from ciuic.ledger.archive import Folder, read_archive
from ciuic.ledger.copy import KIND, Committed, LoadedCopy, load_copy
from ciuic.ledger.entry import Part, Snapshot
from ciuic.ledger.files import write_durable
from ciuic.ledger.journal import Attached, Departed, Journal, Rebuilt, Started
from ciuic.ledger.store import write_origin
from ciuic.net.keeping_messages import RebuiltReply

ALLOWED = re.compile(r"copy\.json|samples\.json|fragment-\d{1,3}/\d{10}\.(?:base|log)")
RUN_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")


def read_copy(path: Path, scratch: Path, limit_bytes: int) -> LoadedCopy:
    """Unpack and replay an exported copy; every digest is checked. Raises FrameError, StorageError, JobFileError."""
    sink = Folder(scratch, limit_bytes)
    try:
        read_archive(path, KIND, ALLOWED, sink)
        sink.close()
        copy = load_copy(scratch)
    except NotFoundError as error:
        raise LedgerDamagedError("the file holds no whole copy", cause=error.cause) from error
    except FrameError as error:
        way = "give what `ciuic node export-ledger` wrote, or the folder of a run on a node"
        raise FrameError("this is not a copy of a ledger", cause=error.cause or error.message, next=way) from error
    finally:
        sink.close()
        shutil.rmtree(scratch, ignore_errors=True)
    if not RUN_ID.fullmatch(copy.about.run_id):
        raise LedgerDamagedError(f"{copy.about.run_id[:80]!r} is not the name of a run")
    parse_job(copy.about.job)
    return copy


def write_ledger(copy: LoadedCopy, folder: Path) -> RebuiltReply:
    """Make the folder of the run. Raises StorageError; half a folder does not stay."""
    job, layout = parse_job(copy.about.job), copy.layout
    try:
        folder.mkdir(mode=0o700)
        write_durable(folder / "layout.json", msgspec.json.encode(layout))
        ground = Ground(run_id=copy.about.run_id, job=job, layout=layout, clock=lambda: 0.0)
        for number, snapshot in enumerate(copy.snapshots):
            _write_fragment(ground, number, snapshot, folder / f"fragment-{number}")
        committed = copy.committed or Committed(version=0, total=copy.about.total_samples)
        _write_journal(folder / "journal.bin", committed, copy.about.node_id)
    except (CiuicError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return _reply(copy, job, committed)


def _write_fragment(ground: Ground, number: int, snapshot: Snapshot, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    write_origin(folder, snapshot.header.version)
    rounds = FragmentRounds(ground, number, settings_of(ground.job), folder)
    try:
        aggregator = rounds.aggregator
        zeros = np.zeros(aggregator.element_count, np.float32)
        vectors: dict[Part, np.ndarray] = {**snapshot.vectors, "residual": zeros}
        aggregator.restore(Snapshot(header=snapshot.header, vectors=vectors))
        aggregator.outer_state = aggregator.outer.start(aggregator.element_count)
        rounds.store.save_snapshot(aggregator.snapshot(ground.run_id))
    finally:
        rounds.close()


def _write_journal(path: Path, committed: Committed, node: str) -> None:
    journal = Journal(path)
    try:
        if committed.total:
            journal.append(Started(total_samples=committed.total))
        ranges = tuple((start, stop) for start, stop in committed.ranges)
        journal.append(Rebuilt(committed=ranges, duplicated=committed.duplicated, node=node))
        for name, incarnation in sorted(committed.incarnations.items()):
            journal.append(Attached(node=name, incarnation=incarnation + FENCE))
            journal.append(Departed(node=name, state="gone"))
    finally:
        journal.close()


def _reply(copy: LoadedCopy, job: Job, committed: Committed) -> RebuiltReply:
    return RebuiltReply(
        run_id=copy.about.run_id,
        node_id=copy.about.node_id,
        versions=[snapshot.header.version for snapshot in copy.snapshots],
        digests=[snapshot.header.digest for snapshot in copy.snapshots],
        committed=sum(stop - start for start, stop in committed.ranges),
        total=committed.total,
        samples_known=copy.committed is not None,
        lost=_lost(copy, job),
    )


def _lost(copy: LoadedCopy, job: Job) -> list[str]:
    """What a node's copy cannot bring back."""
    lost = ["pushes that the hub had accepted and not merged: their samples are trained again"]
    if copy.layout.step is None or copy.layout.step.freeze_at < 1:
        lost.append("what the hub's compression had left for its next entry (its residual): it starts at zero")
    if job.sync.outer_momentum:
        lost.append("the outer momentum: it starts at zero")
    lost.append("events, logs, rounds and held-out losses before this version")
    lost.append("settings that were changed while the run was at work: those of its job hold")
    if copy.committed is None:
        lost.append("which samples were committed: all are trained again")
    return lost

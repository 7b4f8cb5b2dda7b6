"""Rebuild a fragment of the hub from its files, and check every digest on the way."""

import itertools
from dataclasses import dataclass

import numpy as np

from ciuic.errors import FrameError, LedgerDamagedError
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import Entry, Push, Snapshot, base_digest
from ciuic.ledger.store import FragmentStore, settled_keys


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What came out of the files besides the aggregator's state."""

    inbox: list[Push]
    """Accepted pushes that no entry has merged or rejected."""
    merged: list[Entry]
    """All entries, version 1 first."""
    snapshot_version: int


def rebuild(aggregator: Aggregator, store: FragmentStore, run: str) -> Rebuilt:
    """Newest good snapshot, then each later entry aggregated again from its pushes.

    Raises LedgerDamagedError when the files do not fit together.
    """
    snapshot = _newest_good(aggregator, store)
    aggregator.restore(snapshot)
    entries = [store.entry(version) for version in range(1, store.version + 1)]
    _check_chain(entries, snapshot)
    for entry in entries[snapshot.header.version :]:
        header = entry.header
        pushes = [store.load_push((c.node, c.incarnation, c.sequence)) for c in header.contributors]
        facts = Facts(
            run=run,
            epoch=header.epoch,
            samples_committed=header.samples_committed,
            time=header.time,
            why=header.why,
        )
        candidate = aggregator.close(pushes, header.rejected, facts)
        if candidate.entry.header != header or not np.array_equal(candidate.entry.payload, entry.payload):
            raise LedgerDamagedError(
                f"entry {header.version} does not come out of its pushes again",
                cause="a push or the snapshot changed on the disk, or another numpy rounds differently",
                next="restore the ledger's folder from a backup",
            )
        aggregator.commit(candidate)
    settled = {key for entry in entries for key in settled_keys(entry)}
    inbox = [store.load_push(key) for key in store.push_keys() if key not in settled]
    for entry in entries[: store.snapshot_versions()[0]]:
        store.drop_pushes(settled_keys(entry))  # what a crash left behind
    return Rebuilt(inbox=inbox, merged=entries, snapshot_version=snapshot.header.version)


def _newest_good(aggregator: Aggregator, store: FragmentStore) -> Snapshot:
    problems: list[str] = []
    for version in reversed(store.snapshot_versions()):
        try:
            snapshot = store.load_snapshot(version)
        except (FrameError, LedgerDamagedError) as error:
            problems.append(f"{version}: {error.message}")
            continue
        header = snapshot.header
        if header.version > store.version or header.layout_digest != aggregator.layout.digest:
            problems.append(f"{version}: it belongs to another log")
        elif base_digest(snapshot.vectors["base"], header.counters) != header.digest:
            problems.append(f"{version}: its base has another digest")
        else:
            return snapshot
    raise LedgerDamagedError(
        f"there is no good snapshot in {store.folder}",
        cause="; ".join(problems) or "the folder has none",
        next="restore the ledger's folder from a backup",
    )


def _check_chain(entries: list[Entry], snapshot: Snapshot) -> None:
    for before, after in itertools.pairwise(entries):
        if after.header.previous_digest != before.header.digest or after.header.version != before.header.version + 1:
            raise LedgerDamagedError(f"entry {after.header.version} does not follow entry {before.header.version}")
    version = snapshot.header.version
    if version and entries[version - 1].header.digest != snapshot.header.digest:
        raise LedgerDamagedError(f"the snapshot of version {version} does not fit the log")

"""Rebuild a fragment of the hub from its files, and check every digest on the way."""

import itertools
from dataclasses import dataclass

from ciuic.errors import FrameError, LedgerDamagedError
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import EntryHeader, Push, Snapshot, base_digest
from ciuic.ledger.store import FragmentStore, settled_keys


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What came out of the files besides the aggregator's state."""

    inbox: list[Push]
    """Accepted pushes that no entry has merged or rejected."""
    merged: list[EntryHeader]
    """Of all entries in the log, oldest first."""
    snapshot_version: int


def rebuild(aggregator: Aggregator, store: FragmentStore, run: str) -> Rebuilt:
    """Newest good snapshot, then each later entry aggregated again from its pushes.

    Raises LedgerDamagedError when the files do not fit together.
    """
    snapshot = _newest_good(aggregator, store)
    aggregator.restore(snapshot)
    origin = store.origin
    headers = [store.entry(version).header for version in range(origin + 1, store.version + 1)]
    _check_chain(headers, snapshot, origin)
    for header in headers[snapshot.header.version - origin :]:
        entry = store.entry(header.version)
        pushes = [store.load_push((c.node, c.incarnation, c.sequence)) for c in header.contributors]
        facts = Facts(
            run=run,
            epoch=header.epoch,
            samples_committed=header.samples_committed,
            time=header.time,
            why=header.why,
            stretch=header.stretch,
            codec=header.codec,
            weights={(c.node, c.incarnation, c.sequence): c.weight for c in header.contributors},
            marks={(c.node, c.incarnation, c.sequence): (c.norm, c.clip) for c in header.contributors},
            step=header.step,
            payload=entry.payload,
        )
        try:
            candidate = aggregator.close(pushes, header.rejected, facts)
        except FrameError as error:
            raise LedgerDamagedError(
                f"entry {header.version} does not come out of its pushes again", cause=error.message
            ) from error
        if candidate.entry.header != header:
            raise LedgerDamagedError(
                f"entry {header.version} does not come out of its pushes again",
                cause="a push or the snapshot changed on the disk, or another numpy rounds differently",
                next="restore the ledger's folder from a backup",
            )
        aggregator.commit(candidate)
    settled = {key for header in headers for key in settled_keys(header)}
    inbox = [store.load_push(key) for key in store.push_keys() if key not in settled]
    for header in headers[: max(0, store.snapshot_versions()[0] - origin)]:
        store.drop_pushes(settled_keys(header))  # what a crash left behind
    return Rebuilt(inbox=inbox, merged=headers, snapshot_version=snapshot.header.version)


def _newest_good(aggregator: Aggregator, store: FragmentStore) -> Snapshot:
    problems: list[str] = []
    for version in reversed(store.snapshot_versions()):
        try:
            snapshot = store.load_snapshot(version)
        except (FrameError, LedgerDamagedError) as error:
            problems.append(f"{version}: {error.message}")
            continue
        header = snapshot.header
        if not store.origin <= header.version <= store.version or header.layout_digest != aggregator.layout.digest:
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


def _check_chain(headers: list[EntryHeader], snapshot: Snapshot, origin: int) -> None:
    if headers and headers[0].version != origin + 1:
        raise LedgerDamagedError(f"the log begins with entry {headers[0].version} instead of {origin + 1}")
    for before, after in itertools.pairwise(headers):
        if after.previous_digest != before.digest or after.version != before.version + 1:
            raise LedgerDamagedError(f"entry {after.version} does not follow entry {before.version}")
    version = snapshot.header.version
    if version > origin and headers[version - origin - 1].digest != snapshot.header.digest:
        raise LedgerDamagedError(f"the snapshot of version {version} does not fit the log")

"""A node's copy of a run's ledger on disk: per fragment one snapshot and the entries after it. No torch, no threads.

copy.json                      run, node, job, layout; written last, so that a half-made copy never counts
samples.json                   which samples are committed at a version of fragment 0, as the hub told it
fragment-0/0000000012.base     the base at version 12, in `gradient` mode with its moments
fragment-0/0000000012.log      the entries after it

What only the hub knows is not in it: its residual, the outer momentum, pushes that were not merged, the journal.
"""

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ciuic.codec import FragmentCodec
from ciuic.errors import DigestMismatchError, FrameError, LedgerDamagedError, NotFoundError, StorageError
from ciuic.ledger.archive import Item, bytes_item, file_item
from ciuic.ledger.entry import (
    Entry,
    Part,
    Snapshot,
    SnapshotHeader,
    base_digest,
    entry_from_frame,
    snapshot_from_frame,
)
from ciuic.ledger.files import AppendLog, count_frames, storage_error, write_parts_durable
from ciuic.ledger.intervals import IntervalSet, Range
from ciuic.ledger.layout import Layout, layout_from_dict
from ciuic.ledger.snapshots import is_snapshot_due
from ciuic.ledger.stepping import Stepper, StepState

ABOUT, SAMPLES = "copy.json", "samples.json"
KIND = "ciuic-ledger-1"
"""Of an archive that holds a copy."""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """The sample ledger at a version of fragment 0."""

    version: int
    total: int
    ranges: list[Range] = []
    """Committed samples, [start, stop)."""
    duplicated: int = 0
    incarnations: dict[str, int] = {}
    """Of the nodes, so that a process from before the rebuild is never taken for a present one."""


class CopyAbout(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy is of."""

    run_id: str
    node_id: str
    job: dict[str, Any]
    layout: dict[str, Any]
    total_samples: int


# ---- replaying -----------------------------------------------------------------------------------------------------


class Replayer:
    """A base that entries move, as on a node. Raises DigestMismatchError when it comes out different."""

    def __init__(self, layout: Layout, fragment: int, snapshot: Snapshot) -> None:
        header = snapshot.header
        self._layout, self._fragment = layout, fragment
        self._shape = layout.fragment_shape(fragment)
        self._codecs: dict[str, FragmentCodec] = {}
        self._stepper = Stepper(layout, fragment) if layout.step is not None else None
        self._moments = self._stepper.start() if self._stepper is not None else None
        if self._moments is not None and "first" in snapshot.vectors:
            first, second = snapshot.vectors["first"].copy(), snapshot.vectors["second"].copy()
            self._moments = StepState(first=first, second=second)
        self._base, self._header = snapshot.vectors["base"].copy(), header
        self.version, self.digest = header.version, header.digest
        if header.layout_digest != layout.digest or base_digest(self._base, header.counters) != header.digest:
            raise DigestMismatchError(f"the base at version {header.version} is not what its header says")

    def apply(self, entry: Entry) -> None:
        """Move the base by the next entry."""
        header = entry.header
        if (header.version, header.previous_digest) != (self.version + 1, self.digest):
            raise DigestMismatchError(f"entry {header.version} does not follow version {self.version}")
        codec = self._codecs.get(header.codec) or FragmentCodec(header.codec, self._shape)
        self._codecs[header.codec] = codec
        phase = self._header.phase
        if self._stepper is None or self._moments is None:
            codec.accumulate(entry.payload, np.float32(-1), self._base)
        elif header.step is None:
            raise FrameError(f"entry {header.version} has no step, this run is in gradient mode")
        else:
            mean, facts = codec.decode(entry.payload), header.step
            self._base, self._moments = self._stepper.apply(self._base, mean, self._moments, facts, header.version)
            phase = facts.next_phase
        self.version, self.digest = header.version, base_digest(self._base, header.counters)
        if self.digest != header.digest:
            raise DigestMismatchError(f"version {header.version} does not come out of its entries again")
        self._header = msgspec.structs.replace(
            self._header, version=header.version, digest=header.digest, counters=header.counters, phase=phase
        )

    def snapshot(self) -> Snapshot:
        """The base now. Its vectors are not copied."""
        vectors: dict[Part, Any] = {"base": self._base}
        if self._moments is not None:
            vectors |= {"first": self._moments.first, "second": self._moments.second}
        header = msgspec.structs.replace(self._header, parts=tuple(vectors))
        return Snapshot(header=header, vectors=vectors)


# ---- the files of one fragment -------------------------------------------------------------------------------------


def base_path(folder: Path, version: int) -> Path:
    """File of the base at a version."""
    return folder / f"{version:010d}.base"


def log_path(folder: Path, version: int) -> Path:
    """File of the entries after that version."""
    return folder / f"{version:010d}.log"


def read_base(folder: Path, version: int, element_count: int) -> Snapshot:
    """The base of that version; its vectors are views of the file. Raises FrameError, StorageError."""
    path = base_path(folder, version)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise StorageError(f"cannot read {path}", cause=str(error)) from error
    return snapshot_from_frame(memoryview(data), element_count)


def newest_base(folder: Path) -> int:
    """Version of the newest base; -1: none."""
    return max((int(path.stem) for path in folder.glob("[0-9]*.base")), default=-1)


class FragmentCopy:
    """One fragment of a copy that is being written."""

    def __init__(self, folder: Path, layout: Layout, number: int) -> None:
        """Makes the folder. Raises StorageError."""
        self.folder, self._layout, self._number = folder, layout, number
        self._element_count = layout.fragment_shape(number).element_count
        self.base_version = -1
        self.log_bytes = 0
        self._log: AppendLog | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise storage_error(f"cannot create {folder}", error) from error

    @property
    def version(self) -> int:
        return self.base_version + (len(self._log) if self._log is not None else 0)

    @property
    def wants_base(self) -> bool:
        """It is time for a new base, at the version at which the hub writes its snapshot, too."""
        return is_snapshot_due(self.log_bytes, self._element_count)

    def until_base(self, frames: list[bytes]) -> int:
        """How many of these entries may come before `wants_base` has to be asked again; at least 1."""
        total = self.log_bytes
        for count, frame in enumerate(frames, start=1):
            total += len(frame)
            if is_snapshot_due(total, self._element_count):
                return count
        return len(frames)

    def begin(self, version: int) -> None:
        """The base of this version is in its file: entries after it may come. Older files go. Raises StorageError."""
        log = AppendLog(log_path(self.folder, version), "entry")
        if self._log is not None:
            self._log.close()
        self._log, self.base_version = log, version
        self.log_bytes = sum(length for _, length in log.frames)
        keep = {base_path(self.folder, version).name, log.path.name}
        try:
            for path in self.folder.iterdir():
                if path.name not in keep:
                    path.unlink()
        except OSError as error:
            raise storage_error(f"cannot tidy {self.folder}", error) from error

    def append(self, frames: list[bytes]) -> None:
        """The next entries, durable when it returns. Raises StorageError, and then nothing has changed."""
        if self._log is None:
            raise StorageError(f"{self.folder} has no base yet")
        self._log.append_all(frames)
        self.log_bytes += sum(len(frame) for frame in frames)

    def headers(self) -> list[Any]:
        """Of the entries after the base."""
        return [entry_from_frame(frame).header for frame in self._log or ()]

    def renew_base(self) -> None:
        """Replay the entries into a new base, then forget them. Raises StorageError, DigestMismatchError."""
        if self._log is None or not len(self._log):
            return
        replayer = Replayer(self._layout, self._number, read_base(self.folder, self.base_version, self._element_count))
        for frame in self._log:
            replayer.apply(entry_from_frame(frame))
        write_parts_durable(base_path(self.folder, replayer.version), replayer.snapshot().frame_parts())
        self.begin(replayer.version)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


# ---- samples -------------------------------------------------------------------------------------------------------


def committed_after(known: Committed, headers: Iterable[Any]) -> Committed:
    """The same after these entries of fragment 0; those up to the known version are in it already."""
    samples, duplicated, version = IntervalSet(known.ranges), known.duplicated, known.version
    incarnations = dict(known.incarnations)
    for header in headers:
        for contributor in header.contributors:
            node = contributor.node
            incarnations[node] = max(incarnations.get(node, 0), contributor.incarnation)
        if header.version <= known.version:
            continue
        for contributor in header.contributors:
            duplicated += sum(samples.add(start, stop) for start, stop in contributor.ranges)
        version = max(version, header.version)
    return msgspec.structs.replace(
        known, version=version, ranges=list(samples), duplicated=duplicated, incarnations=incarnations
    )


# ---- a whole copy, read --------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class LoadedCopy:
    """A copy, replayed to its end; every digest was checked."""

    about: CopyAbout
    layout: Layout
    snapshots: list[Snapshot] = field(default_factory=list)
    """Of each fragment, at its newest version."""
    committed: Committed | None = None
    """None: the hub was lost before it could tell what was committed, so nothing is known."""


def load_copy(folder: Path) -> LoadedCopy:
    """Read and replay a copy that nobody writes; a torn last entry is cut off.

    Raises NotFoundError, LedgerDamagedError, StorageError.
    """
    about = _decoded(folder / ABOUT, CopyAbout)
    try:
        found = LoadedCopy(about=about, layout=layout_from_dict(about.layout))
        for number in range(found.layout.fragment_count):
            snapshot, headers = _replayed(folder / f"fragment-{number}", found.layout, number)
            found.snapshots.append(snapshot)
            if number == 0:
                found.committed = _committed(folder, about, headers, snapshot.header.version)
    except OSError as error:
        raise storage_error(f"cannot read {folder}", error) from error
    except (FrameError, DigestMismatchError) as error:
        raise LedgerDamagedError(
            f"the copy in {folder} is damaged", cause=error.message, next="take the copy of another node of the run"
        ) from error
    return found


def _replayed(folder: Path, layout: Layout, number: int) -> tuple[Snapshot, list[Any]]:
    version = newest_base(folder)
    if version < 0:
        raise FrameError(f"there is no base in {folder.name}")
    replayer = Replayer(layout, number, read_base(folder, version, layout.fragment_shape(number).element_count))
    headers = []
    if log_path(folder, version).exists():
        log = AppendLog(log_path(folder, version), "entry")
        try:
            for frame in log:
                entry = entry_from_frame(frame)
                replayer.apply(entry)
                headers.append(entry.header)
        finally:
            log.close()
    return replayer.snapshot(), headers


def _committed(folder: Path, about: CopyAbout, headers: list[Any], version: int) -> Committed | None:
    begins = version - len(headers)
    known = Committed(version=0, total=about.total_samples) if begins == 0 else None
    if (folder / SAMPLES).exists():
        told = _decoded(folder / SAMPLES, Committed)
        if begins <= told.version <= version:
            known = told
    return None if known is None else committed_after(known, headers)


def _decoded(path: Path, kind: Any) -> Any:
    if not path.exists():
        raise NotFoundError(f"there is no copy of a ledger in {path.parent}", cause=f"{path.name} is missing")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise LedgerDamagedError(f"{path} cannot be read", cause=str(error)) from error


def load_about(folder: Path) -> CopyAbout | None:
    """What the copy in a folder is of; None when it is not complete."""
    try:
        return _decoded(folder / ABOUT, CopyAbout)
    except (NotFoundError, LedgerDamagedError):
        return None


def newest_version(folder: Path) -> int:
    """How far fragment 0 of a copy that somebody else may write has come; nothing is changed. -1: nothing there."""
    part = folder / "fragment-0"
    version = newest_base(part)
    if version < 0 or not log_path(part, version).exists():
        return version
    return version + count_frames(log_path(part, version), "entry")


def newest_copy(root: Path) -> Path:
    """The folder of a run's newest whole copy below `root`. Raises NotFoundError."""
    whole = [path for path in sorted(root.glob("[0-9]*")) if load_about(path) is not None]
    if load_about(root) is not None:
        return root
    if not whole:
        raise NotFoundError(
            f"there is no copy of a ledger in {root}",
            cause="no worker of this node has attached to the run, or its job says keep_ledger = false",
            next="look on another node of the run",
        )
    return whole[-1]


def export_items(folder: Path) -> list[Item]:
    """The files of a copy for an archive, also while its worker writes: logs as far as they are now.

    Raises NotFoundError, StorageError.
    """
    found = [file_item(ABOUT, folder / ABOUT)]
    try:
        if (folder / SAMPLES).exists():
            found.append(bytes_item(SAMPLES, (folder / SAMPLES).read_bytes()))
        for part in sorted(folder.glob("fragment-*")):
            version = newest_base(part)
            paths = [path for path in (base_path(part, version), log_path(part, version)) if path.exists()]
            found += [_held(f"{part.name}/{path.name}", path) for path in paths]
    except OSError as error:
        raise storage_error(f"cannot read {folder}", error) from error
    return found


def _held(name: str, path: Path) -> Item:
    """An item of a file that may be removed before it is read: it is opened now."""
    file = path.open("rb")
    return Item(name=name, size_bytes=os.fstat(file.fileno()).st_size, open=lambda: file)


def version_0(about: CopyAbout, layout: Layout, fragment: int, base: Any, counters: tuple[int, ...]) -> Snapshot:
    """A base at version 0 that was not downloaded but made here; a copy of `base`."""
    header = SnapshotHeader(
        run=about.run_id,
        fragment=fragment,
        version=0,
        layout_digest=layout.digest,
        digest=base_digest(base, counters),
        parts=("base",),
        counters=counters,
    )
    return Snapshot(header=header, vectors={"base": base.copy()})

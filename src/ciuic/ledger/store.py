"""The files of one fragment on the hub: entry log, snapshots and the accepted pushes no snapshot covers yet.

log.bin                     entries, version 1 first; the only truth
origin.json                 only where the ledger does not begin at version 0: the version before the log's first entry
snapshots/0000000012.base   the base at version 12, as nodes download it; .hub: residual and momentum (two are kept)
pushes/<node>.<inc>.<seq>   accepted pushes, kept until a snapshot covers the entry they are in
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from ciuic.errors import ConflictError, FrameError, LedgerDamagedError
from ciuic.ledger.entry import (
    Entry,
    EntryHeader,
    Part,
    Push,
    Snapshot,
    entry_from_frame,
    push_from_frame,
    snapshot_from_frame,
)
from ciuic.ledger.files import AppendLog, Spooled, storage_error, write_durable

Key = tuple[str, int, int]
FOR_NODES: tuple[Part, ...] = ("base", "first", "second")
"""What a node needs of a snapshot: the base and, in `gradient` mode, the moments of its step."""
KEEP_SNAPSHOTS = 2
ORIGIN = "origin.json"


class FragmentStore:
    """Durable state of one fragment."""

    def __init__(self, folder: Path, element_count: int) -> None:
        self.folder, self.element_count = folder, element_count
        self._pushes = folder / "pushes"
        try:
            for name in ("snapshots", "pushes"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(f"cannot create {folder}", error) from error
        self._drop_leftovers()
        self.origin = _read_origin(folder / ORIGIN)
        """The version before the first entry of the log: 0, or that of the copy it was rebuilt from."""
        self.log = AppendLog(folder / "log.bin", "entry")
        self.entry_bytes_total = sum(length for _, length in self.log.frames)

    # ---- entries: log index 0 is the version after `origin`

    @property
    def version(self) -> int:
        return self.origin + len(self.log)

    def entry(self, version: int) -> Entry:
        return entry_from_frame(self.log.read(version - 1 - self.origin))

    def entry_bytes(self, version: int) -> int:
        """Size of the frame of one entry."""
        return self.log.frames[version - 1 - self.origin][1]

    def entries_after(self, version: int, max_bytes: int) -> list[bytes]:
        """Frames of the versions after `version`: at least one if there is one, then up to `max_bytes`.

        Raises ConflictError when they are older than the log.
        """
        if version < self.origin:
            raise ConflictError(
                f"the hub has no entries before version {self.origin}, and version {version} needs them",
                cause="its ledger was rebuilt from a node's copy",
                next="the worker loads a snapshot again",
            )
        frames: list[bytes] = []
        total = 0
        for index in range(version - self.origin, len(self.log)):
            length = self.log.frames[index][1]
            if frames and total + length > max_bytes:
                break
            frames.append(self.log.read(index))
            total += length
        return frames

    def append(self, entry: Entry) -> int:
        """Durable when it returns; gives the frame's bytes."""
        frame = entry.to_frame()
        self.log.append(frame)
        self.entry_bytes_total += len(frame)
        return len(frame)

    def bytes_since(self, version: int) -> int:
        """Bytes of the entries after `version`."""
        return sum(length for _, length in self.log.frames[max(0, version - self.origin) :])

    # ---- pushes

    def push_path(self, key: Key) -> Path:
        node, incarnation, sequence = key
        return self._pushes / f"{node}.{incarnation}.{sequence}"

    def save_push(self, key: Key, frame: bytes, spooled: Spooled | None = None) -> None:
        """Durable when it returns. `spooled`: a file with these bytes, to become this one. Raises StorageError."""
        path = self.push_path(key)
        if spooled is None or not spooled.keep_as(path):
            write_durable(path, frame)

    def load_push(self, key: Key) -> Push:
        """Raises LedgerDamagedError when an accepted push is missing or damaged."""
        path = self.push_path(key)
        try:
            return push_from_frame(path.read_bytes())
        except (FrameError, OSError) as error:
            raise LedgerDamagedError(
                f"the accepted push {path.name} cannot be read",
                cause=str(error),
                next="restore the file from a backup",
            ) from error

    def push_keys(self) -> list[Key]:
        """All pushes on disk, in order."""
        keys: list[Key] = []
        for path in (self.folder / "pushes").iterdir():
            if path.name.startswith("."):
                path.unlink()  # a temporary file of a crash
                continue
            node, incarnation, sequence = path.name.rsplit(".", 2)
            keys.append((node, int(incarnation), int(sequence)))
        return sorted(keys)

    # ---- snapshots: the base in a file that nodes download as it is, the hub's own state beside it

    def snapshot_path(self, version: int) -> Path:
        """The base of a snapshot, as a frame for nodes."""
        return self.folder / "snapshots" / f"{version:010d}.base"

    def _hub_state_path(self, version: int) -> Path:
        return self.folder / "snapshots" / f"{version:010d}.hub"

    def snapshot_versions(self) -> list[int]:
        return sorted(int(p.stem) for p in (self.folder / "snapshots").glob("[0-9]*.base"))

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Write it, then drop what it covers: older snapshots but one, and pushes merged before the kept ones."""
        version, parts = snapshot.header.version, snapshot.header.parts
        rest = tuple(part for part in parts if part not in FOR_NODES)
        write_durable(self._hub_state_path(version), _part_of(snapshot, rest).to_frame())
        write_durable(
            self.snapshot_path(version), _part_of(snapshot, tuple(p for p in parts if p in FOR_NODES)).to_frame()
        )
        self._drop_leftovers()
        self._drop_pushes_before(self.snapshot_versions()[0])

    def _drop_leftovers(self) -> None:
        """Old snapshots but the newest ones, and what a crash left behind."""
        kept = self.snapshot_versions()[-KEEP_SNAPSHOTS:]
        files = {path for version in kept for path in (self.snapshot_path(version), self._hub_state_path(version))}
        try:
            for path in (self.folder / "snapshots").iterdir():
                if path not in files:
                    path.unlink()
        except OSError as error:
            raise storage_error(f"cannot tidy {self.folder}", error) from error

    def _drop_pushes_before(self, version: int) -> None:
        for covered in range(version, self.origin, -1):
            keys = settled_keys(self.entry(covered).header)
            if covered < version and not any(self.push_path(key).exists() for key in keys):
                return
            self.drop_pushes(keys)

    def drop_pushes(self, keys: Iterable[Key]) -> None:
        """Accepted pushes that a snapshot covers."""
        try:
            for key in keys:
                self.push_path(key).unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(f"cannot tidy {self.folder}", error) from error

    def load_snapshot(self, version: int) -> Snapshot:
        """All parts of a snapshot. Raises FrameError or LedgerDamagedError."""
        try:
            base = snapshot_from_frame(self.snapshot_path(version).read_bytes(), self.element_count)
            rest = snapshot_from_frame(self._hub_state_path(version).read_bytes(), self.element_count)
        except OSError as error:
            raise LedgerDamagedError(f"snapshot {version} cannot be read", cause=str(error)) from error
        if base.header.digest != rest.header.digest:
            raise LedgerDamagedError(f"the two files of snapshot {version} do not belong together")
        header = msgspec.structs.replace(base.header, parts=(*base.header.parts, *rest.header.parts))
        return Snapshot(header=header, vectors={**base.vectors, **rest.vectors})

    def close(self) -> None:
        self.log.close()


def write_origin(folder: Path, version: int) -> None:
    """Let the ledger of a new folder begin at a version, of which a snapshot is there. Raises StorageError."""
    write_durable(folder / ORIGIN, msgspec.json.encode({"version": version}))


def _read_origin(path: Path) -> int:
    if not path.exists():
        return 0
    try:
        version = msgspec.json.decode(path.read_bytes(), type=dict[str, int])["version"]
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise LedgerDamagedError(f"{path} cannot be read", cause=str(error), next="restore it from a backup") from error
    if version < 0:
        raise LedgerDamagedError(f"{path} names version {version}")
    return version


def settled_keys(header: EntryHeader) -> list[Key]:
    """The pushes that an entry merged or rejected."""
    return [(x.node, x.incarnation, x.sequence) for x in (*header.contributors, *header.rejected)]


def _part_of(snapshot: Snapshot, parts: tuple[Part, ...]) -> Snapshot:
    header = msgspec.structs.replace(snapshot.header, parts=parts)
    return Snapshot(header=header, vectors=snapshot.vectors)

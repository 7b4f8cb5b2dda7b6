"""Crash-safe files: a file is either the old one or the new one, and an append is either whole or not there."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ciuic.errors import FrameError, LedgerDamagedError, StorageError
from ciuic.ledger.frame import PREFIX_BYTES, Buffer, Kind, find_frame, frame_bytes, read_frame

_READ_BYTES = 1 << 30
"""The system reads and writes at most 2 GiB at once."""


def write_durable(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: temporary file, fsync, rename, fsync of the folder. Raises StorageError."""
    write_parts_durable(path, [data])


def write_parts_durable(path: Path, parts: Sequence[Buffer]) -> None:
    """The same with data that lies in several places. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(f"cannot write {path}", error) from error


class Spooled(Protocol):
    """Bytes that are in a file already, though not durably."""

    def keep_as(self, path: Path) -> bool:
        """Make the file durable under this name, in place of what is there. False: write the bytes instead."""
        ...


def move_durable(descriptor: int, source: Path, path: Path) -> None:
    """An open, whole file gets another name for good: its bytes first, then the name. Raises OSError.

    After a kill in between it has either name, and all its bytes.
    """
    os.fsync(descriptor)
    source.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(what: str, error: OSError) -> StorageError:
    """The three lines for a failed read or write."""
    return StorageError(
        what,
        cause=error.strerror or str(error),
        next="free or repair the disk; nothing that was acknowledged is lost, work goes on when there is space again",
    )


class AppendLog:
    """Frames of one kind, one after the other; each append is durable before it returns.

    A torn last frame (a crash inside an append) is cut off when the log is opened; damage anywhere else is an error.
    """

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path, self.kind = path, kind
        self.frames: list[tuple[int, int]] = []
        """(offset, bytes) of each frame."""
        self.torn_bytes = 0
        """How many bytes of an unfinished append were cut off at opening."""
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise storage_error(f"cannot open {path}", error) from error
        try:
            self._scan()
            if not self._end:
                sync_folder(path.parent)
        except OSError as error:
            self._file.close()
            raise storage_error(f"cannot open {path}", error) from error
        except LedgerDamagedError:
            self._file.close()
            raise

    def _scan(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        offset = 0
        while offset < size:
            length = self._whole_frame(offset, size)
            if length is None:
                break
            self.frames.append((offset, length))
            offset += length
        if offset < size:
            self._check_torn(offset, size)
            self.torn_bytes = size - offset
            os.ftruncate(self._file.fileno(), offset)
            os.fsync(self._file.fileno())
        self._end = offset

    def _check_torn(self, offset: int, size: int) -> None:
        """An unfinished append has nothing behind it: a whole frame there shows damage that no crash explains."""
        behind = find_frame(self._bytes_at(offset, size - offset), self.kind, start=1)
        if behind is not None:
            raise self._damaged(offset, FrameError(f"no whole {self.kind} is there, but one at {offset + behind}"))

    def _bytes_at(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length > 0:
            part = os.pread(self._file.fileno(), min(length, _READ_BYTES), offset)
            if not part:
                break
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _whole_frame(self, offset: int, size: int) -> int | None:
        """Length of the frame at `offset`; None when it is the torn end of the log."""
        prefix = self._bytes_at(offset, min(PREFIX_BYTES, size - offset))
        try:
            length = frame_bytes(prefix, self.kind)
        except FrameError as error:
            if len(prefix) < PREFIX_BYTES:
                return None
            # An append is one write of a whole frame: a torn one has its first bytes, or zeros the disk never filled.
            if not any(prefix):
                return None
            raise self._damaged(offset, error) from error
        if offset + length > size:
            return None
        try:
            read_frame(self._bytes_at(offset, length), self.kind)
        except FrameError as error:
            if offset + length == size:
                return None
            raise self._damaged(offset, error) from error
        return length

    def _damaged(self, offset: int, error: FrameError) -> LedgerDamagedError:
        return LedgerDamagedError(
            f"{self.path} is damaged at byte {offset}",
            cause=f"{error.message}, and it is not the end of the file",
            next="restore this file from a backup or from a node's copy; it was not changed",
        )

    def __len__(self) -> int:
        return len(self.frames)

    def read(self, index: int) -> bytes:
        """The bytes of one frame (checked when it was opened or written)."""
        offset, length = self.frames[index]
        try:
            data = self._bytes_at(offset, length)
        except OSError as error:
            raise storage_error(f"cannot read {self.path}", error) from error
        if len(data) != length:
            raise LedgerDamagedError(f"{self.path} is shorter than it was", cause=f"frame {index} is cut")
        return data

    def __iter__(self) -> Iterator[bytes]:
        return (self.read(index) for index in range(len(self.frames)))

    def append(self, frame: bytes) -> None:
        """Durable when it returns. Raises StorageError, and then the log is as it was."""
        self.append_all([frame])

    def append_all(self, frames: list[bytes]) -> None:
        """Several frames at once, durable when it returns. Raises StorageError, and then the log is as it was."""
        frame = frames[0] if len(frames) == 1 else b"".join(frames)
        try:
            written = 0
            while written < len(frame):
                written += os.write(self._file.fileno(), memoryview(frame)[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._end)
            raise storage_error(f"cannot append to {self.path}", error) from error
        for one in frames:
            self.frames.append((self._end, len(one)))
            self._end += len(one)

    def close(self) -> None:
        self._file.close()


def count_frames(path: Path, kind: Kind) -> int:
    """Whole frames of a log that another process may be appending to; only their headers are read."""
    count = offset = 0
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while offset + PREFIX_BYTES <= size:
                offset += frame_bytes(os.pread(file.fileno(), PREFIX_BYTES, offset), kind)
                count += offset <= size
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from error
    except FrameError:
        return count  # the torn end of an append
    return count

"""Bodies that arrive in chunks, on disk until they are whole. Synchronous, thread-safe; no sockets.

One file per upload, at its full size from the start (sparse), chunks written in place. A file that an earlier process
left is taken up: every chunk that is in it already has the announced digest. Nothing here needs to be durable: what a
power cut takes is sent again. The file of a push becomes the ledger's, by another name, once it is accepted.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ciuic.errors import CiuicError, ConflictError, FrameError
from ciuic.ledger.files import move_durable, storage_error
from ciuic.net.chunks import Buffer, ChunksReply, Manifest, to_ranges

IDLE_S = 600.0
"""An upload on which nothing arrives for so long is given up."""
FULL_BODIES = 2
"""So many of the largest bodies may be open per run and node."""
MOST_UPLOADS = 1024
"""Per run and node, small ones and finished ones together."""
FLUSH_BYTES = 4 << 20
"""After so many bytes a push's file is flushed while the rest is still on its way."""
_READ_BYTES = 1 << 30
_log = logging.getLogger(__name__)
Key = tuple[str, str]
"""(run, node)."""


@dataclass(kw_only=True, eq=False)
class Upload:
    """One body on its way. `store`, `read` and `missing` may be called from any thread."""

    key: Key
    manifest: Manifest
    path: Path
    result: ChunksReply | None = None
    """The answer, once the body was taken; its file is gone then."""
    refusal: CiuicError | None = None
    """Why the whole body was not wanted; whoever else is at it hears the same."""
    touched_s: float = 0.0
    busy: int = 0
    """Requests that are at it now."""
    _there: bytearray = field(init=False)
    _left: int = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _beginning: threading.Lock = field(default_factory=threading.Lock)
    _has_begun: bool = False
    _failure: CiuicError | None = None
    _fd: int = -1
    _unflushed_bytes: int = 0
    _is_doubtful: bool = False
    """Some of what was written may not reach the disk."""

    def __post_init__(self) -> None:
        self._there, self._left = bytearray(self.manifest.count), self.manifest.count

    def begin(self) -> None:
        """Open the file, once; what an earlier process has written is read, and counts. Raises StorageError."""
        with self._beginning:
            if self._failure is not None:
                raise self._failure
            if not self._has_begun:
                self._open()
                self._has_begun = True

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            had = os.fstat(self._fd).st_size
            os.ftruncate(self._fd, self.manifest.total_bytes)
            if had == self.manifest.total_bytes:
                self._take_up()
        except OSError as error:
            self.end()
            self._failure = storage_error(f"cannot write {self.path}", error)
            raise self._failure from error

    def _take_up(self) -> None:
        for index in range(self.manifest.count):
            start, stop = self.manifest.span(index)
            if self.manifest.holds(index, os.pread(self._fd, stop - start, start)):
                self._there[index] = 1
        self._left = self._there.count(0)

    def has(self, index: int) -> bool:
        """Whether this chunk has arrived."""
        return bool(self._there[index])

    @property
    def is_whole(self) -> bool:
        return self._left == 0

    def missing(self) -> list[tuple[int, int]]:
        """Ranges of chunks that have not arrived."""
        return to_ranges(index for index, there in enumerate(self._there) if not there)

    def store(self, index: int, chunk: Buffer) -> None:
        """Keep one chunk; one that is there already is dropped. Raises FrameError, StorageError."""
        if self.has(index):
            return
        if not self.manifest.holds(index, chunk):
            raise FrameError(
                f"chunk {index} of an upload has another content than was announced",
                cause="it was damaged on its way",
                next="send it again",
            )
        start, _ = self.manifest.span(index)
        try:
            _write_at(self._fd, chunk, start)
        except OSError as error:
            raise storage_error(f"cannot write {self.path}", error) from error
        with self._lock:
            self._left -= not self._there[index]
            self._there[index] = 1
            self._unflushed_bytes += len(chunk)
            is_due = self._unflushed_bytes >= FLUSH_BYTES and self.manifest.what == "push"
            if is_due:
                self._unflushed_bytes = 0
        if is_due:
            self._flush()

    def _flush(self) -> None:
        """Begin early with what `keep_as` would have to wait for."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:  # the kernel says so only once
            _log.warning("%s cannot be flushed: %s", self.path, error)
            self._is_doubtful = True

    def read(self) -> bytes:
        """The whole body. Raises StorageError."""
        parts: list[bytes] = []
        left = self.manifest.total_bytes
        try:
            while left and (part := os.pread(self._fd, min(left, _READ_BYTES), self.manifest.total_bytes - left)):
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise storage_error(f"cannot read {self.path}", error) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def keep_as(self, path: Path) -> bool:
        """The file of a whole body, durable under another name; False: it cannot be moved there.

        Requests that are still at it may write a chunk again: the same bytes in their place.
        """
        if not self.is_whole or self._is_doubtful:
            return False
        try:
            move_durable(self._fd, self.path, path)
        except OSError as error:  # another file system, or a disk that refuses: the bytes are written anew
            _log.debug("%s is not moved: %s", self.path, error)
            return False
        return True

    def finish(self, result: ChunksReply) -> None:
        """The body was taken; the answer is kept for whoever did not hear it."""
        self.result = result
        self.remove_file()

    def close(self) -> None:
        """Close the file; it stays."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def end(self) -> None:
        """Close and remove the file: nobody is at it."""
        self.close()
        self.remove_file()

    def remove_file(self) -> None:
        """It stays open for those who are at it: a number that was closed may be another file's in the next moment."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


class Spool:
    """All uploads of one port."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic, idle_s: float = IDLE_S) -> None:
        self._folder, self._clock, self._idle_s = folder, clock, idle_s
        self._uploads: dict[tuple[Key, str], Upload] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._uploads)

    @property
    def idle_s(self) -> float:
        return self._idle_s

    def open(self, key: Key, manifest: Manifest, limit_bytes: int) -> Upload:
        """The upload of this content, begun or taken up; call `leave` with it afterwards.

        `limit_bytes`: the largest body of this run. Raises ConflictError for too many at once, StorageError.
        """
        name = manifest.id
        with self._lock:
            upload = self._uploads.get((key, name))
            if upload is None:
                self._make_room(key, manifest.total_bytes, limit_bytes)
                path = self._folder / key[0] / f"{key[1]}.{name}"
                upload = self._uploads[key, name] = Upload(key=key, manifest=manifest, path=path)
            upload.busy += 1
            upload.touched_s = self._clock()
        try:
            if upload.result is None:
                upload.begin()  # may read all of a large file, so not under the lock
        except BaseException:
            self.drop(upload)
            self.leave(upload)
            raise
        return upload

    def leave(self, upload: Upload) -> None:
        """A request that was at it has ended."""
        with self._lock:
            upload.busy -= 1
            upload.touched_s = self._clock()
            is_over = upload.result is not None or not self._has(upload)
            if is_over and not upload.busy:
                upload.close()

    def drop(self, upload: Upload) -> None:
        """Give it up: its content is not wanted. Its file is closed when the last request has left."""
        with self._lock:
            if self._has(upload):
                del self._uploads[upload.key, upload.manifest.id]
                upload.remove_file()

    def _has(self, upload: Upload) -> bool:
        return self._uploads.get((upload.key, upload.manifest.id)) is upload

    def sweep(self) -> int:
        """Give up what is idle for too long, also files of earlier processes; returns how many uploads are left."""
        now_s = self._clock()
        with self._lock:
            old = [u for u in self._uploads.values() if not u.busy and now_s - u.touched_s >= self._idle_s]
            for upload in old:
                self._remove(upload)
            known = {upload.path for upload in self._uploads.values()}
            before = time.time() - self._idle_s
            with suppress(OSError):
                for path in self._folder.glob("*/*"):
                    if path not in known and path.stat().st_mtime < before:
                        path.unlink()
        return len(self._uploads)

    def close(self) -> None:
        """Close the files; a next process takes them up."""
        with self._lock:
            for upload in self._uploads.values():
                upload.close()
            self._uploads = {}

    def _make_room(self, key: Key, size_bytes: int, limit_bytes: int) -> None:
        """Under the lock: older uploads of the node give way to its newer ones. Raises ConflictError."""
        mine = sorted((u for u in self._uploads.values() if u.key == key), key=lambda u: u.touched_s)
        total = size_bytes + sum(u.manifest.total_bytes for u in mine if u.result is None)
        count = len(mine) + 1
        for upload in mine:
            if total <= FULL_BODIES * limit_bytes and count <= MOST_UPLOADS:
                return
            if upload.busy:
                continue
            count -= 1
            total -= upload.manifest.total_bytes if upload.result is None else 0
            self._remove(upload)
        if total > FULL_BODIES * limit_bytes or count > MOST_UPLOADS:
            raise ConflictError(f"{key[1]} sends too many bodies to {key[0]} at once", next="wait for their answers")

    def _remove(self, upload: Upload) -> None:
        self._uploads.pop((upload.key, upload.manifest.id), None)
        upload.end()


def _write_at(fd: int, data: Buffer, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count

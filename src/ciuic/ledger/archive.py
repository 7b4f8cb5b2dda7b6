"""Many files in one: a tar stream compressed with zstandard, made and read piece by piece, in bounded memory.

    about.json      first: what kind of archive it is, and what is told about its content
    ...             the files
    manifest.json   last: size and digest of every file; an archive that was cut on the way has none

Plain tools can open it: `tar --zstd -tf FILE`.
"""

import io
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import xxhash
import zstandard

from ciuic.errors import FrameError, StorageError, UsageError
from ciuic.ledger.files import storage_error, sync_folder

ABOUT, MANIFEST = "about.json", "manifest.json"
PIECE_BYTES = 1 << 20
LEVEL = 3
"""Of zstandard: parameters and pushes hardly shrink, the database and headers do at any level."""
MAX_FACTS_BYTES = 64 << 20
_BLOCK = 512


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The first member."""

    kind: str
    """Like ciuic-backup-1: the number is that of the format."""
    made_at: float
    facts: dict[str, Any] = {}


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    files: dict[str, tuple[int, str]]
    """Name -> (bytes, digest)."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One file of an archive that is being made."""

    name: str
    size_bytes: int
    """How much of it is taken; an append-only file may be longer by the time it is read."""
    open: Callable[[], IO[bytes]]


def file_item(name: str, path: Path, size_bytes: int | None = None) -> Item:
    """An item from a file, or from its first bytes."""
    return Item(
        name=name, size_bytes=path.stat().st_size if size_bytes is None else size_bytes, open=lambda: path.open("rb")
    )


def bytes_item(name: str, data: bytes) -> Item:
    """An item from memory."""
    return Item(name=name, size_bytes=len(data), open=lambda: io.BytesIO(data))


# ---- making --------------------------------------------------------------------------------------------------------


def archive_pieces(kind: str, facts: dict[str, Any], items: Iterable[Item]) -> Iterator[bytes]:
    """The archive, piece by piece. Raises StorageError when a file cannot be read, or is shorter than it was."""
    squeeze = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compressobj()
    files: dict[str, tuple[int, str]] = {}
    about = About(kind=kind, made_at=time.time(), facts=facts)
    for raw in _raw(bytes_item(ABOUT, msgspec.json.encode(about)), {}):
        yield squeeze.compress(raw)
    for item in items:
        for raw in _raw(item, files):
            if piece := squeeze.compress(raw):
                yield piece
    last = bytes_item(MANIFEST, msgspec.json.encode(_Manifest(files=files)))
    for raw in [*_raw(last, {}), bytes(2 * _BLOCK)]:
        yield squeeze.compress(raw)
    yield squeeze.flush()


def _raw(item: Item, files: dict[str, tuple[int, str]]) -> Iterator[bytes]:
    """Header, content and padding of one member."""
    member = tarfile.TarInfo(item.name)
    member.size, member.mode, member.mtime = item.size_bytes, 0o600, int(time.time())
    yield member.tobuf(tarfile.GNU_FORMAT)
    digest, left = xxhash.xxh3_128(), item.size_bytes
    try:
        with item.open() as file:
            while left > 0:
                piece = file.read(min(left, PIECE_BYTES))
                if not piece:
                    raise StorageError(f"{item.name} has become {left} bytes shorter while it was read")
                digest.update(piece)
                left -= len(piece)
                yield piece
    except OSError as error:
        raise storage_error(f"cannot read {item.name}", error) from error
    files[item.name] = (item.size_bytes, digest.hexdigest())
    yield bytes(-item.size_bytes % _BLOCK)


def write_archive(path: Path, pieces: Iterable[bytes]) -> int:
    """Put an archive into a new file that only its owner may read; returns its bytes.

    Raises UsageError when the file is there already, StorageError. Nothing stays when it fails.
    """
    total, part = 0, path.with_name(f".{path.name}.part")
    if path.exists():
        raise UsageError(f"{path} is there already", next="choose another name; nothing is overwritten")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for piece in pieces:
                total += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error(f"cannot write {path}", error) from error
    finally:
        part.unlink(missing_ok=True)
    return total


# ---- reading -------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Where the files of an archive go."""

    def __call__(self, name: str, size_bytes: int) -> Callable[[bytes], object]:
        """Called once per file; the result takes its content piece by piece."""
        ...


def read_archive(path: Path, kind: str, allowed: re.Pattern[str], sink: Sink | None = None) -> About:
    """Read an archive to its end and check every size and digest; without `sink` nothing is kept.

    Raises FrameError when it is cut, damaged or of another kind, or holds a name that is not `allowed` (as a whole).
    """
    try:
        with path.open("rb") as file:
            return _read(file, kind, allowed, sink or (lambda name, size_bytes: len))
    except (zstandard.ZstdError, tarfile.TarError, msgspec.DecodeError, EOFError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise storage_error(f"cannot read {path}", error) from error
    except FrameError as error:
        raise _damaged(path, error.message) from error


def _damaged(path: Path, why: str) -> FrameError:
    return FrameError(f"{path} is not a whole archive", cause=why[:300], next="copy it again, or take another one")


def _read(file: IO[bytes], kind: str, allowed: re.Pattern[str], sink: Sink) -> About:
    about: About | None = None
    found: dict[str, tuple[int, str]] = {}
    with zstandard.ZstdDecompressor().stream_reader(file) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is None or not member.isreg():
                raise FrameError(f"{member.name[:100]!r} in it is no plain file")
            if about is None:
                about = _about(member, content, kind)
            elif member.name == MANIFEST:
                _check(msgspec.json.decode(_small(member, content), type=_Manifest), found)
                while plain.read(_BLOCK * 16):  # to the checksum
                    pass
                return about
            elif not allowed.fullmatch(member.name) or member.name in found:
                raise FrameError(f"it holds {member.name[:100]!r}, which does not belong there")
            else:
                found[member.name] = (member.size, _pass_on(content, sink(member.name, member.size)))
    raise FrameError("it ends in the middle")


def _about(member: tarfile.TarInfo, content: IO[bytes], kind: str) -> About:
    if member.name != ABOUT:
        raise FrameError(f"it begins with {member.name[:100]!r}")
    about = msgspec.json.decode(_small(member, content), type=About)
    if about.kind != kind:
        raise FrameError(f"it is a {about.kind[:40]}, not a {kind}")
    return about


def _small(member: tarfile.TarInfo, content: IO[bytes]) -> bytes:
    if member.size > MAX_FACTS_BYTES:
        raise FrameError(f"{member.name} in it has {member.size} bytes")
    return content.read()


def _pass_on(content: IO[bytes], take: Callable[[bytes], object]) -> str:
    digest = xxhash.xxh3_128()
    while piece := content.read(PIECE_BYTES):
        digest.update(piece)
        take(piece)
    return digest.hexdigest()


def _check(manifest: _Manifest, found: dict[str, tuple[int, str]]) -> None:
    wrong = [name for name, facts in manifest.files.items() if found.get(name) != facts]
    if wrong or manifest.files.keys() != found.keys():
        raise FrameError(f"{(wrong or sorted(found.keys() - manifest.files.keys()))[0]} in it is not what was put in")


class Folder:
    """A sink that writes files below a folder, for their owner only, and never more than `limit_bytes`."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.left_bytes = folder, limit_bytes
        self._open: IO[bytes] | None = None
        self._name = ""

    def __call__(self, name: str, size_bytes: int) -> Callable[[bytes], object]:
        """Begin the next file; its name was checked. Raises StorageError when it does not fit."""
        self.close()
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise StorageError(
                f"there is no room for {name}",
                cause=f"it has {size_bytes} bytes, {max(0, self.left_bytes + size_bytes)} are left",
                next="make room and start again",
            )
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        except OSError as error:
            raise storage_error(f"cannot write {path}", error) from error
        self._name = name
        return self._write

    def _write(self, piece: bytes) -> None:
        if self._open is not None:
            try:
                self._open.write(piece)
            except OSError as error:
                raise storage_error(f"cannot write {self._name}", error) from error

    def close(self) -> None:
        """Make the last file durable."""
        if self._open is None:
            return
        file, self._open = self._open, None
        try:
            with file:
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(f"cannot write {self._name}", error) from error

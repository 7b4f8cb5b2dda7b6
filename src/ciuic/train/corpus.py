"""Text as documents: the default corpus, text files, and which documents are held out.

The default corpus is what every machine with Python has: the sources of the standard library. The same Python version
gives the same bytes; files that differ by machine and packages that distributions leave out are not part of it.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ciuic.errors import DataError

_EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
    | {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"}
)
_EXCLUDED_FILES = ("_sysconfigdata", "_distutils_system_mod", "sitecustomize", "usercustomize", "turtle")
_SMALLEST_CORPUS_BYTES = 1_000_000
_SMALLEST_DOCUMENT_BYTES = 1 << 10
_LARGEST_DOCUMENT_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Document:
    """A piece of text that is held out as a whole or not at all."""

    text: bytes
    key: bytes
    """What decides whether it is held out: the file's name in the default corpus, else the text itself."""


def is_held_out(key: bytes, fraction: float) -> bool:
    """Whether a document belongs to the held-out part: the same answer everywhere, for about `fraction` of all keys.

    What is held out at a fraction is also held out at every larger one.
    """
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") < fraction * 2**64


def stdlib_files(folder: Path | None = None) -> list[Path]:
    """The corpus's files in order of their names below the standard library's folder.

    Raises DataError when this Python has no sources.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder_name, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        sources = (name for name in names if name.endswith(".py") and not name.startswith(_EXCLUDED_FILES))
        found += [Path(folder_name, name) for name in sources]
    if sum(path.stat().st_size for path in found) < _SMALLEST_CORPUS_BYTES:
        raise DataError(
            "this Python comes without the sources of its standard library",
            cause=f"{root} holds {len(found)} source files",
            next="use a Python with sources, or set data.path or data.hf",
        )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def stdlib_documents(folder: Path | None = None) -> Iterator[Document]:
    """One document per file of the default corpus."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib_files(root):
        yield Document(text=_read(path), key=path.relative_to(root).as_posix().encode())


def corpus_digest(documents: Iterable[Document] | None = None) -> str:
    """SHA-256 (hex) over the texts and keys in order; of the default corpus when nothing is given."""
    digest = hashlib.sha256()
    for document in stdlib_documents() if documents is None else documents:
        update_digest(digest, document)
    return digest.hexdigest()


def update_digest(digest: "hashlib._Hash", document: Document) -> None:
    """Add one document; lengths keep two documents apart from one that is both."""
    key = hashlib.sha256(document.key).digest()
    digest.update(len(document.text).to_bytes(8, "big") + key)
    digest.update(document.text)


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that match any of the patterns (`**` crosses folders), sorted, each once.

    Raises DataError when a pattern matches none.
    """
    found: set[Path] = set()
    for pattern in patterns:
        expanded = str(Path(pattern).expanduser())
        matches = {Path(name) for name in glob.glob(expanded, recursive=True)}
        files = {path for path in matches if path.is_file()}
        if not files:
            raise DataError(
                f"no file matches data.path {pattern!r}",
                cause=f"searched from {Path.cwd()}" if not Path(expanded).is_absolute() else "",
                next="data.path is read on each node: put the files there, or correct the pattern",
            )
        found |= files
    return sorted(found)


def text_documents(files: Sequence[Path]) -> Iterator[Document]:
    """Documents of text files: a small file is one, a large one is cut at empty lines.

    The size at which a file is cut follows the size of the whole data (1 to 64 KiB), so that even one small file has
    documents to hold out.
    """
    total_bytes = sum(_size_bytes(path) for path in files)
    target_bytes = min(max(total_bytes // 200, _SMALLEST_DOCUMENT_BYTES), _LARGEST_DOCUMENT_BYTES)
    for path in files:
        try:
            with path.open("rb") as file:
                for text in _cut(file, target_bytes):
                    yield Document(text=text, key=text)
        except OSError as error:
            raise _unreadable(path, error) from error


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _cut(file: BinaryIO, target_bytes: int) -> Iterator[bytes]:
    """Pieces that end at an empty line from the target on, at any line from twice the target on."""
    piece = bytearray()
    while line := file.readline(_LARGEST_DOCUMENT_BYTES):
        piece += line
        paragraph_ends = not line.strip()
        if len(piece) >= 2 * target_bytes or (paragraph_ends and len(piece) >= target_bytes):
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read", cause=(error.strerror or str(error)).lower())

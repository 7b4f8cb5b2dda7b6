"""Token sequences as .npy files: written piece by piece, read through a memory map, kept in a cache folder."""

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import platformdirs

from ciuic.errors import StorageError

_FORMAT = 1
_PARTS = ("train", "held_out")


@dataclass(frozen=True, kw_only=True)
class TokenParts:
    """Training and held-out tokens, one-dimensional and unsigned, and the digest of the text they came from."""

    train: np.ndarray
    held_out: np.ndarray
    digest: str


class TokenSink:
    """Appends tokens to an .npy file whose length is not known before the end."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self._file = file
        self._dtype = dtype
        self._start = 0
        self.count = 0
        self.restart()

    def restart(self) -> None:
        """Forget what was written."""
        self._file.seek(0)
        self._file.truncate()
        self.count = 0
        self._write_header()
        self._start = self._file.tell()

    def append(self, tokens: np.ndarray) -> None:
        """Write tokens after those already there."""
        self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self.count += len(tokens)

    def finish(self) -> None:
        """Write the length into the header (NumPy leaves room in it for a growing first dimension)."""
        self._file.seek(0)
        self._write_header()
        if self._file.tell() != self._start:
            raise StorageError("the header of a token file changed its size", cause="a NumPy that Ciuic does not know")
        self._file.flush()

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, header)


Build = Callable[[TokenSink, TokenSink], str]
"""Fills the sinks for training and held-out tokens and returns the digest of the text."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds every token."""
    return np.min_scalar_type(vocab_size - 1)


def build_in_memory(build: Build, dtype: np.dtype) -> TokenParts:
    """The same as `build_cached` without files."""
    files = [io.BytesIO() for _ in _PARTS]
    sinks = [TokenSink(file, dtype) for file in files]
    digest = build(*sinks)
    arrays = [_view(file, dtype, sink.count) for file, sink in zip(files, sinks, strict=True)]
    return TokenParts(train=arrays[0], held_out=arrays[1], digest=digest)


def _view(file: io.BytesIO, dtype: np.dtype, count: int) -> np.ndarray:
    buffer = file.getbuffer()
    return np.frombuffer(buffer, dtype=dtype, count=count, offset=buffer.nbytes - count * dtype.itemsize)


def build_cached(key: object, build: Build, dtype: np.dtype, folder: Path | None = None) -> TokenParts:
    """Memory maps of the tokens for `key` (JSON: all that decides the tokens), built when they are not there yet.

    Several processes may build the same at once; the first one's files stay.
    Raises StorageError when the cache folder cannot be written.
    """
    name = hashlib.sha256(json.dumps([_FORMAT, key], sort_keys=True).encode()).hexdigest()[:32]
    home = (folder or cache_folder()) / "tokens"
    found = _open(home / name, dtype)
    if found is not None:
        return found
    try:
        home.mkdir(parents=True, exist_ok=True)
        _build_into(home, name, build, dtype)
    except OSError as error:
        raise StorageError(
            f"the token cache {home} cannot be written",
            cause=(error.strerror or str(error)).lower(),
            next="make room or set CIUIC_HOME to a folder that can be written",
        ) from error
    found = _open(home / name, dtype)
    if found is None:
        raise StorageError(f"the token cache {home / name} is damaged", next="delete that folder and start again")
    return found


def cache_folder() -> Path:
    """`cache` below CIUIC_HOME, or the user's cache folder."""
    home = os.environ.get("CIUIC_HOME")
    return Path(home) / "cache" if home else platformdirs.user_cache_path("ciuic")


def _build_into(home: Path, name: str, build: Build, dtype: np.dtype) -> None:
    with tempfile.TemporaryDirectory(dir=home, prefix=f"{name}.", ignore_cleanup_errors=True) as temporary:
        work = Path(temporary) / "parts"
        work.mkdir()
        with (work / "train.npy").open("w+b") as train, (work / "held_out.npy").open("w+b") as held_out:
            sinks = TokenSink(train, dtype), TokenSink(held_out, dtype)
            digest = build(*sinks)
            for sink in sinks:
                sink.finish()
        (work / "about.json").write_text(json.dumps({"digest": digest, "count": [sink.count for sink in sinks]}))
        try:
            work.rename(home / name)
        except OSError:
            if _open(home / name, dtype) is None:  # what is there is damaged: ours takes its place
                shutil.rmtree(home / name)
                work.rename(home / name)


def _open(folder: Path, dtype: np.dtype) -> TokenParts | None:
    """The parts in a folder, or None when they are missing or damaged."""
    try:
        about = json.loads((folder / "about.json").read_text())
        maps = [np.load(folder / f"{part}.npy", mmap_mode="r", allow_pickle=False) for part in _PARTS]
        whole = [len(array) for array in maps] == about["count"] and all(array.dtype == dtype for array in maps)
        return TokenParts(train=maps[0], held_out=maps[1], digest=str(about["digest"])) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None

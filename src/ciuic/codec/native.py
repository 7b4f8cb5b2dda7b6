"""kernel.c behind the face of an engine: plain pointers, called without the GIL.

CIUIC_CODEC chooses for tests and measurements: `fallback` (numpy), `portable`, `avx2`, `avx512`, or `native` (the best
level, never the fallback). Unset: the best there is. A wish that cannot be met is a CodecUnavailableError.
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ciuic.codec.blocks import span_bounds
from ciuic.codec.build import LIBRARY, REASON, source_hash
from ciuic.codec.scalar import Bytes, Float
from ciuic.codec.section import SPAN_ELEMENTS, Keys, NumpyEngine, Section, SectionEngine
from ciuic.errors import CodecUnavailableError

LEVELS = ("portable", "avx2", "avx512")
WISHES = ("fallback", *LEVELS, "native")
VARIABLE = "CIUIC_CODEC"
STREAM_BYTES = 1 << 23
"""Results over this are written past the caches: they would not fit."""
THREAD_ELEMENTS = 1 << 22
"""A further thread pays from so many elements on."""
MOST_THREADS = 8
_HERE = Path(__file__).resolve().parent


class _SectionStruct(ctypes.Structure):
    """`section` of kernel.c."""

    _fields_ = (
        ("codec", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("blocks", ctypes.c_int64),
        ("spans", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("span_start", ctypes.c_void_p),
        ("codes_at", ctypes.c_int64),
        ("scales_at", ctypes.c_int64),
    )


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A loaded kernel at one level."""

    library: ctypes.CDLL
    level: int

    @property
    def name(self) -> str:
        return LEVELS[self.level]


class NativeEngine:
    """One section by kernel.c; `threads` change the time, never a byte."""

    def __init__(self, section: Section, kernel: Kernel, threads: int) -> None:
        self._library, self._level = kernel.library, kernel.level
        blocks = section.blocks
        self._count, self._bytes = blocks.element_count, sum(section.sizes)
        self._tables = (_bounds(blocks.lengths), _bounds(blocks.kept), span_bounds(blocks, SPAN_ELEMENTS))
        useful = max(1, min(threads, self._count // THREAD_ELEMENTS))
        sizes = section.sizes
        self._struct = _SectionStruct(
            codec=section.number,
            threads=useful,
            blocks=blocks.block_count,
            spans=len(self._tables[2]) - 1,
            starts=self._tables[0].ctypes.data,
            kept=self._tables[1].ctypes.data,
            span_start=self._tables[2].ctypes.data,
            codes_at=sizes[0] if len(sizes) == 3 else 0,
            scales_at=sum(sizes[:-1]),
        )
        self._address = ctypes.addressof(self._struct)
        self._stream = int(4 * self._count >= STREAM_BYTES)

    def encode(self, values: Float, payload: Bytes, keys: Keys | None) -> None:
        key = None if keys is None else (ctypes.c_uint32 * 2)(*keys)
        values = np.ascontiguousarray(values, np.float32)
        self._check(payload, values)
        self._library.ciuic_encode(
            self._address, self._level, None, values.ctypes.data, None, payload.ctypes.data, key, 0
        )

    def compress(self, minus_d: Float, e: Float, e_next: Float, payload: Bytes) -> int | None:
        minus_d, e = np.ascontiguousarray(minus_d, np.float32), np.ascontiguousarray(e, np.float32)
        self._check(payload, minus_d, e, e_next)
        pointers = (minus_d.ctypes.data, e.ctypes.data, e_next.ctypes.data, payload.ctypes.data)
        bad = self._library.ciuic_encode(self._address, self._level, *pointers, None, self._stream)
        return None if bad < 0 else bad

    def decode(self, payload: Bytes, out: Float) -> None:
        self._decode(payload, out, np.float32(1), accumulate=False)

    def accumulate(self, payload: Bytes, weight: np.float32, out: Float) -> None:
        self._decode(payload, out, weight, accumulate=True)

    def _decode(self, payload: Bytes, out: Float, weight: np.float32, *, accumulate: bool) -> None:
        payload = np.ascontiguousarray(payload)
        self._check(payload, out)
        pointers = (payload.ctypes.data, out.ctypes.data)
        self._library.ciuic_decode(
            self._address, self._level, *pointers, float(weight), int(accumulate), 0 if accumulate else self._stream
        )

    def _check(self, payload: Bytes, *vectors: Float) -> None:
        """Nothing that a pointer could run past: sizes, type and layout."""
        if len(payload) != self._bytes or payload.dtype != np.uint8 or not payload.flags.c_contiguous:
            raise ValueError(f"a payload of this section is {self._bytes} contiguous bytes, not {payload.shape}")
        for vector in vectors:
            if vector.shape != (self._count,) or vector.dtype != np.float32 or not vector.flags.c_contiguous:
                raise ValueError(
                    f"a vector of this section is fp32 [{self._count}], contiguous, not {vector.dtype} {vector.shape}"
                )


def section_engine(section: Section, wish: str | None = None, threads: int | None = None) -> SectionEngine:
    """The engine for a section. `wish` as CIUIC_CODEC. Raises CodecUnavailableError when it cannot be met."""
    kernel = choose_kernel(wish)
    if kernel is None:
        return NumpyEngine(section)
    return NativeEngine(section, kernel, default_threads() if threads is None else threads)


def choose_kernel(wish: str | None = None) -> Kernel | None:
    """The kernel to use, None for numpy. Raises CodecUnavailableError for a wish that cannot be met."""
    wish = os.environ.get(VARIABLE, "") if wish is None else wish
    if wish not in ("", *WISHES):
        raise CodecUnavailableError(
            f"{VARIABLE}={wish!r} is not a codec back end",
            cause=f"known: {', '.join(WISHES)}",
            next=f"unset {VARIABLE} to get the best one",
        )
    if wish == "fallback":
        return None
    library, reason = load_library()
    if library is None:
        if not wish:
            return None
        raise CodecUnavailableError(
            f"the native codec kernel is not there, but {VARIABLE}={wish} asks for it",
            cause=reason,
            next="install a C compiler and install ciuic again",
        )
    best = int(library.ciuic_best_level())
    level = LEVELS.index(wish) if wish in LEVELS else best
    if level > best:
        raise CodecUnavailableError(
            f"this processor has no {wish}",
            cause=f"the best level here is {LEVELS[best]}",
            next=f"unset {VARIABLE} to get the best one",
        )
    return Kernel(library=library, level=level)


@cache
def load_library(folder: Path = _HERE) -> tuple[ctypes.CDLL | None, str]:
    """The library beside kernel.c, or None and why there is none."""
    path, note = folder / LIBRARY, folder / REASON
    if not path.exists():
        return None, note.read_text().strip() if note.exists() else "ciuic was installed without building it"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"it cannot be loaded: {error}"
    library.ciuic_source_hash.restype = ctypes.c_char_p
    if library.ciuic_source_hash() != source_hash(folder / "kernel.c").encode():
        return None, "it was built from another kernel.c: install ciuic again"
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    library.ciuic_best_level.restype = number
    library.ciuic_encode.restype = ctypes.c_int64
    library.ciuic_encode.argtypes = [pointer, number, pointer, pointer, pointer, pointer, pointer, number]
    library.ciuic_decode.restype = None
    library.ciuic_decode.argtypes = [pointer, number, pointer, pointer, ctypes.c_float, number, number]
    return library, ""


def default_threads() -> int:
    """Processors this process may use, at most 8, and at most OMP_NUM_THREADS where that is set."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(usable, MOST_THREADS, int(limit) if limit.isdigit() else MOST_THREADS))


def describe_back_end() -> str:
    """For `ciuic env`: "native avx512, up to 2 threads", or "numpy fallback" and why."""
    wish = os.environ.get(VARIABLE, "")
    try:
        kernel = choose_kernel()
    except CodecUnavailableError as error:
        return f"none: {error.message} ({error.cause})"
    if kernel is not None:
        return f"native {kernel.name}, up to {default_threads()} threads"
    return f"numpy fallback ({f'{VARIABLE}={wish}' if wish else load_library()[1]})"


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n + 1] sums of what lies before, and of all."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])

"""Fragment shapes and vectors that every codec must survive, for tests by example and by hypothesis."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ciuic.codec import FragmentCodec, FragmentShape
from ciuic.codec.native import LEVELS, load_library


def shape_of(*rows: tuple[int, int], small: int = 0, buffers: int = 0) -> FragmentShape:
    """A fragment of these (row count, row length) tensors, small elements and buffer elements."""
    return FragmentShape(rows=rows, small_count=small, buffer_count=buffers)


def native_levels() -> list[str]:
    """The levels of the native kernel that run here; none without a compiler."""
    library, _ = load_library()
    return [] if library is None else list(LEVELS[: library.ciuic_best_level() + 1])


BACK_ENDS = ["fallback", *native_levels()]

SHAPES = {
    "no tensors": shape_of(),
    "only small": shape_of(small=5),
    "only buffers": shape_of(buffers=3),
    "one element": shape_of((1, 1)),
    "one of each": shape_of((1, 1), small=1, buffers=1),
    "two odd": shape_of((1, 3), (1, 7), small=3, buffers=1),
    "not a multiple of 8": shape_of((1, 13), small=2),
    "a whole block": shape_of((1, 4096), small=1),
    "one over a block": shape_of((1, 4097), buffers=2),
    "one under a block": shape_of((1, 255), (1, 4095)),
    "rows": shape_of((5, 7), (3, 257), (2, 1), small=9, buffers=4),
    "rows of blocks": shape_of((2, 8193), (3, 512), small=1),
    "no rows": shape_of((0, 7), (4, 0), (2, 3), small=1),
}

KINDS = ("normal", "zeros", "minus zeros", "denormals", "huge", "mixed", "heavy tail", "sparse", "constant")


def vector(kind: str, count: int, seed: int = 0) -> NDArray[np.float32]:
    """Finite fp32 [count] of a kind."""
    random = np.random.default_rng(seed)
    normal = random.normal(size=count)
    with np.errstate(over="ignore"):
        match kind:
            case "zeros":
                values = np.zeros(count)
            case "minus zeros":
                values = np.full(count, -0.0)
            case "denormals":
                values = normal * 1e-41
            case "huge":
                values = np.sign(normal) * 1e38
            case "mixed":
                values = np.sign(normal) * 10.0 ** random.uniform(-44, 38, count)
            case "heavy tail":
                values = random.standard_t(1.5, count)
            case "sparse":
                values = np.where(random.random(count) < 0.01, normal, 0.0)
            case "constant":
                values = np.full(count, normal[0] if count else 0.0)
            case _:
                values = normal
    return values.astype(np.float32)


_ROWS = st.tuples(st.integers(0, 5), st.integers(0, 40)) | st.sampled_from(
    [(1, 255), (1, 256), (2, 257), (1, 4095), (1, 4096), (1, 4097), (3, 600)]
)


@st.composite
def shapes(draw: st.DrawFn) -> FragmentShape:
    """Any fragment: rows of many lengths, small and buffer sections of any size, also nothing at all."""
    rows = draw(st.lists(_ROWS, max_size=4))
    return shape_of(*rows, small=draw(st.integers(0, 20)), buffers=draw(st.integers(0, 9)))


@st.composite
def fragments(draw: st.DrawFn) -> tuple[FragmentShape, NDArray[np.float32]]:
    """A fragment and finite values [element_count] for it, some rows of them zero."""
    shape = draw(shapes())
    values = vector(draw(st.sampled_from(KINDS)), shape.element_count, draw(st.integers(0, 2**32 - 1)))
    start = 0
    for number, (count, length) in enumerate(shape.rows):
        if draw(st.booleans()):
            values[start : start + (count * length) // (number + 1)] = 0
        start += count * length
    return shape, values


def block_lengths(rows: tuple[tuple[int, int], ...], most: int) -> list[int]:
    """Elements of each scale block, written down naively."""
    lengths: list[int] = []
    for count, length in rows:
        for _ in range(count):
            left = length
            while left > 0:
                lengths.append(min(left, most))
                left -= lengths[-1]
    return lengths


def same_bits(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    """Bit for bit the same fp32 numbers."""
    return left.shape == right.shape and np.array_equal(left.view(np.int32), right.view(np.int32))


def same_or_nan(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    """The same bits; the bits of a NaN are the business of each back end."""
    nan = np.isnan(left)
    return np.array_equal(nan, np.isnan(right)) and same_bits(left[~nan], right[~nan])


def encoded_alike(name: str, shape: FragmentShape, ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> bool:
    """Equal bytes, but a mean may be rounded the other way in the last bit of a 1-bit scale."""
    if name == "1-bit":
        start = (shape.coded_count + 7) // 8
        stop = start + 2 * len(block_lengths(shape.rows, 4096))
        scales = [np.frombuffer(p[start:stop].tobytes(), "<u2").astype(int) for p in (ours, theirs)]
        if np.abs(scales[0] - scales[1]).max(initial=0) > 1:
            return False
        ours, theirs = (np.delete(p, np.s_[start:stop]) for p in (ours, theirs))
    return np.array_equal(ours, theirs)


def garbage(size: int, seed: int) -> NDArray[np.uint8]:
    """Bytes [size] that mean nothing."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def codec_of(back_end: str, name: str, shape: FragmentShape, threads: int = 1) -> FragmentCodec:
    return FragmentCodec(name, shape, back_end=back_end, threads=threads)

"""The numpy fallback and every level of the native kernel: the same values from the same bytes, the same bytes too."""

import numpy as np
import pytest
from codec_cases import (
    BACK_ENDS,
    KINDS,
    SHAPES,
    codec_of,
    encoded_alike,
    fragments,
    garbage,
    native_levels,
    same_bits,
    same_or_nan,
    shape_of,
    shapes,
    vector,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic.codec import CODEC_NAMES, FragmentShape, NumpyVectors
from ciuic.codec import native as native_module
from ciuic.errors import FrameError

Case = tuple[FragmentShape, np.ndarray]
NAMES = st.sampled_from(CODEC_NAMES)
NATIVE = native_levels()
EVERY = pytest.mark.parametrize("back_end", BACK_ENDS)
EVERY_NATIVE = pytest.mark.parametrize("back_end", NATIVE or [pytest.param("", marks=pytest.mark.skip("no kernel"))])


def off_by(values: np.ndarray, elements: int) -> np.ndarray:
    """The same numbers, that many elements past the start of their memory."""
    moved = np.zeros(len(values) + elements, values.dtype)[elements:]
    moved[:] = values
    return moved


@EVERY_NATIVE
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_the_kernel_agrees_with_numpy_on_every_shape_and_kind(name: str, shape: FragmentShape, back_end: str) -> None:
    ours, theirs = codec_of("fallback", name, shape), codec_of(back_end, name, shape)
    for kind in KINDS:
        values = vector(kind, shape.element_count)
        payload = ours.encode(values)
        assert encoded_alike(name, shape, payload, theirs.encode(values))
        assert same_bits(theirs.decode(payload), ours.decode(payload))


@EVERY_NATIVE
@given(name=NAMES, case=fragments(), offset=st.integers(0, 17))
def test_the_kernel_encodes_as_numpy_does_wherever_the_vector_lies(
    back_end: str, name: str, case: Case, offset: int
) -> None:
    shape, values = case
    moved = off_by(values, offset)
    before = moved.copy()
    assert encoded_alike(
        name, shape, codec_of("fallback", name, shape).encode(values), codec_of(back_end, name, shape).encode(moved)
    )
    assert same_bits(moved, before)


@EVERY_NATIVE
@given(name=NAMES, shape=shapes(), seed=st.integers(0, 2**32 - 1), offset=st.integers(0, 9))
def test_the_kernel_decodes_garbage_as_numpy_does_wherever_it_lies(
    back_end: str, name: str, shape: FragmentShape, seed: int, offset: int
) -> None:
    ours, theirs = codec_of("fallback", name, shape), codec_of(back_end, name, shape)
    payload = garbage(ours.payload_bytes, seed)
    out = off_by(np.full(shape.element_count, np.nan, np.float32), offset)
    assert theirs.decode(off_by(payload, offset), out) is out
    assert same_or_nan(out, ours.decode(payload))


@EVERY_NATIVE
@pytest.mark.parametrize("name", ["int8", "int4", "2-bit", "1-bit", "bf16", "topk"])
def test_every_scale_there_is_decodes_as_in_numpy(name: str, back_end: str) -> None:
    shape = shape_of((1 << 15 if name == "topk" else 1 << 16, 2))
    payload = garbage(codec_of("fallback", name, shape).payload_bytes, 1)
    payload[-(2 << 16) :] = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    with np.errstate(invalid="ignore"):
        assert same_or_nan(
            codec_of(back_end, name, shape).decode(payload), codec_of("fallback", name, shape).decode(payload)
        )


@EVERY
@given(name=NAMES, case=fragments(), seed=st.integers(0, 1000), offset=st.integers(0, 17))
def test_compressing_is_subtracting_encoding_and_keeping_the_error(
    back_end: str, name: str, case: Case, seed: int, offset: int
) -> None:
    shape, values = case
    e, minus_d = off_by(np.clip(values, -1e30, 1e30), offset), vector("normal", shape.element_count, seed)
    inputs = e.copy(), minus_d.copy()
    e_next = off_by(np.full_like(e, np.nan), offset)
    codec, reference = codec_of(back_end, name, shape), codec_of("fallback", name, shape)
    payload, bad = codec.compress(minus_d, e, e_next)
    x = e - minus_d
    assert bad is None
    assert encoded_alike(name, shape, reference.encode(x), payload)
    assert same_bits(e_next, x - reference.decode(payload))
    assert same_bits(e, inputs[0])
    assert same_bits(minus_d, inputs[1])


@EVERY
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_minus_zero_has_the_sign_of_its_bit_in_the_error_too(name: str, back_end: str) -> None:
    shape = shape_of((1, 64), small=2, buffers=2)
    e = np.full(shape.element_count, -0.0, np.float32)
    e[::3] = 1
    e_next = np.empty_like(e)
    codec = codec_of(back_end, name, shape)
    payload, _ = codec.compress(np.zeros_like(e), e, e_next)
    assert same_bits(e_next, e - codec.decode(payload))


@EVERY
@given(name=NAMES, shape=shapes(), place=st.integers(0, 10_000), bad=st.sampled_from([np.inf, -np.inf, np.nan, 1.3e30]))
def test_the_first_value_that_is_not_finite_is_named(
    back_end: str, name: str, shape: FragmentShape, place: int, bad: float
) -> None:
    e = np.ones(shape.element_count, np.float32)
    if not len(e):
        return
    e[place % len(e) :: 3] = bad
    _, found = codec_of(back_end, name, shape).compress(np.zeros_like(e), e, np.empty_like(e))
    assert found == place % len(e)


@EVERY
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_large_sums_of_accepted_values_are_not_taken_for_infinities(name: str, back_end: str) -> None:
    shape = shape_of((1, 4096), small=3)
    e, e_next = np.full(shape.element_count, 1.2e30, np.float32), np.empty(shape.element_count, np.float32)
    codec = codec_of(back_end, name, shape)
    payload, bad = codec.compress(np.zeros_like(e), e, e_next)
    assert bad is None
    assert np.isfinite(codec.decode(payload)).all()
    assert np.isfinite(e_next).all()


@EVERY
@given(name=NAMES, case=fragments(), weight=st.floats(0, 1, width=32), offset=st.integers(0, 17))
def test_accumulating_is_decoding_multiplying_and_adding(
    back_end: str, name: str, case: Case, weight: float, offset: int
) -> None:
    shape, values = case
    codec = codec_of(back_end, name, shape)
    payload = codec.encode(values)
    out = off_by(vector("mixed", shape.element_count, 5), offset)
    out[:2] = -0.0
    with np.errstate(over="ignore"):
        expected = out + codec_of("fallback", name, shape).decode(payload) * np.float32(weight)
    codec.accumulate(payload, np.float32(weight), out)
    assert same_bits(out, expected)


@EVERY_NATIVE
@given(name=st.sampled_from(["int8", "int4", "bf16", "none"]), case=fragments(), seed=st.integers(-(2**70), 2**70))
def test_the_kernel_rounds_stochastically_to_the_same_bytes(back_end: str, name: str, case: Case, seed: int) -> None:
    shape, values = case
    ours = codec_of("fallback", name, shape).encode(values, dither=seed)
    assert np.array_equal(codec_of(back_end, name, shape).encode(values, dither=seed), ours)


@pytest.mark.skipif(not NATIVE, reason="no kernel")
@settings(max_examples=20, deadline=None)
@given(
    name=NAMES,
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9000)), min_size=1, max_size=4),
    threads=st.integers(2, 70),
)
def test_threads_change_no_byte(name: str, rows: list[tuple[int, int]], threads: int) -> None:
    shape = shape_of(*rows, small=3)
    values = vector("heavy tail", shape.element_count, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_module, "THREAD_ELEMENTS", 1)
        patch.setattr(native_module, "SPAN_ELEMENTS", 500)
        codec = codec_of("native", name, shape, threads)
    one = codec_of("native", name, shape)
    e_next, expected = np.empty_like(values), np.empty_like(values)
    payload, bad = codec.compress(np.zeros_like(values), values, e_next)
    assert bad is None
    assert np.array_equal(payload, one.compress(np.zeros_like(values), values, expected)[0])
    assert same_bits(e_next, expected)
    assert same_bits(codec.decode(payload), one.decode(payload))
    values[[len(values) // 2, -1]] = np.nan
    assert codec.compress(np.zeros_like(values), values, e_next)[1] == len(values) // 2


@EVERY
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_vector_larger_than_the_caches_has_the_same_values(name: str, back_end: str) -> None:
    shape = shape_of((1, 2_200_003), small=5)
    vectors = NumpyVectors()
    values, e_next = vectors.from_host(vector("normal", shape.element_count, 2)), vectors.zeros(shape.element_count)
    codec, reference = codec_of(back_end, name, shape), codec_of("fallback", name, shape)
    payload, _ = codec.compress(vectors.zeros(shape.element_count), values, e_next)
    decoded = reference.decode(payload)
    assert encoded_alike(name, shape, reference.encode(values), payload)
    assert same_bits(codec.decode(payload, vectors.zeros(shape.element_count)), decoded)
    assert same_bits(e_next, values - decoded)


@EVERY
def test_vectors_of_another_size_or_type_are_refused_before_memory_is_touched(back_end: str) -> None:
    codec = codec_of(back_end, "1-bit", shape_of((1, 100)))
    good = np.zeros(100, np.float32)
    with pytest.raises(FrameError):
        codec.accumulate(np.zeros(3, np.uint8), np.float32(1), good)
    if back_end == "fallback":
        return
    payload = codec.encode(good)
    for wrong in (np.zeros(99, np.float32), np.zeros(100, np.float64), np.zeros(200, np.float32)[::2]):
        with pytest.raises(ValueError):
            codec.decode(payload, wrong)
        with pytest.raises(ValueError):
            codec.compress(good, good, wrong)
    with pytest.raises(ValueError):
        codec.encode(np.zeros(99, np.float32))

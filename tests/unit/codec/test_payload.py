"""One fragment as one buffer: its size is a formula, and what comes back is finite and exact where it says so."""

import numpy as np
import pytest
from codec_cases import KINDS, SHAPES, block_lengths, fragments, same_bits, shape_of, shapes, vector
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic.codec import CODEC_NAMES, FragmentCodec, FragmentShape, NumpyVectors
from ciuic.codec.bf16 import bf16_decode, bf16_encode
from ciuic.errors import CodecUnavailableError, FrameError

NAMES = st.sampled_from(CODEC_NAMES)


def formula(name: str, shape: FragmentShape) -> int:
    """Bytes of a payload, independent of the code under test."""
    count = sum(rows * length for rows, length in shape.rows)
    small, buffers = shape.small_count, 4 * shape.buffer_count
    match name:
        case "none":
            return 4 * count + 4 * small + buffers
        case "bf16":
            return 2 * count + 2 * small + buffers
        case "1-bit":
            packed, block = -(-count // 8), 4096
        case "2-bit":
            packed, block = -(-count // 4), 256
        case "topk":
            kept = sum(-(-n // 64) for n in block_lengths(shape.rows, 4096))
            second_scales = 2 * len(block_lengths(shape.rows, 4096))
            packed, block = -(-12 * kept // 8) + -(-2 * kept // 8) + second_scales, 4096
        case "int4":
            packed, block = -(-count // 2), 256
        case _:
            packed, block = count, 256
    return packed + 2 * len(block_lengths(shape.rows, block)) + 2 * small + buffers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_size_is_the_formula_and_decoding_is_finite(name: str, shape: FragmentShape, kind: str) -> None:
    codec = FragmentCodec(name, shape)
    payload = codec.encode(vector(kind, shape.element_count))
    assert codec.payload_bytes == len(payload) == formula(name, shape)
    assert np.isfinite(codec.decode(payload)).all()


@given(name=NAMES, case=fragments())
def test_size_is_the_formula_for_any_fragment(name: str, case: tuple[FragmentShape, np.ndarray]) -> None:
    shape, values = case
    codec = FragmentCodec(name, shape)
    payload = codec.encode(values)
    assert codec.payload_bytes == len(payload) == formula(name, shape)
    decoded = codec.decode(payload)
    assert decoded.dtype == np.float32
    assert decoded.shape == values.shape
    assert np.isfinite(decoded).all()


@given(name=NAMES, case=fragments())
def test_encoding_changes_neither_its_input_nor_depends_on_the_output_buffer(
    name: str, case: tuple[FragmentShape, np.ndarray]
) -> None:
    shape, values = case
    before = values.copy()
    codec = FragmentCodec(name, shape)
    payload = codec.encode(values)
    assert same_bits(values, before)
    dirty = np.full(shape.element_count, np.nan, np.float32)
    assert codec.decode(payload, out=dirty) is dirty
    assert same_bits(dirty, codec.decode(payload))


@given(name=NAMES, shape=shapes())
def test_zeros_decode_to_exact_zeros(name: str, shape: FragmentShape) -> None:
    codec = FragmentCodec(name, shape)
    for kind in ("zeros", "minus zeros"):
        assert not codec.decode(codec.encode(vector(kind, shape.element_count))).any()


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_row_nobody_touched_decodes_to_exact_zeros_between_rows_that_moved(name: str) -> None:
    codec = FragmentCodec(name, shape_of((4, 300)))
    values = vector("normal", 1200).reshape(4, 300)
    values[1] = values[3] = 0
    decoded = codec.decode(codec.encode(values.reshape(-1))).reshape(4, 300)
    assert not decoded[1].any()
    assert not decoded[3].any()
    assert decoded[0].any()
    assert decoded[2].any()


@given(name=NAMES, case=fragments())
def test_small_and_buffer_sections_are_kept_in_their_precision(
    name: str, case: tuple[FragmentShape, np.ndarray]
) -> None:
    shape, values = case
    codec = FragmentCodec(name, shape)
    decoded = codec.decode(codec.encode(values))
    small, buffers = shape.coded_count, shape.coded_count + shape.small_count
    expected = values[small:buffers] if name == "none" else bf16_decode(bf16_encode(values[small:buffers]))
    assert same_bits(decoded[small:buffers], np.ascontiguousarray(expected))
    assert same_bits(decoded[buffers:], values[buffers:])


@given(case=fragments())
def test_codec_none_gives_back_every_bit(case: tuple[FragmentShape, np.ndarray]) -> None:
    shape, values = case
    codec = FragmentCodec("none", shape)
    assert same_bits(codec.decode(codec.encode(values)), values)


@pytest.mark.parametrize(
    ("name", "bits"), [("none", 32), ("bf16", 16), ("int8", 8.0625), ("int4", 4.0625), ("2-bit", 2.0625),
                       ("1-bit", 1.00390625), ("topk", 0.2265625)]
)  # fmt: skip
def test_bits_per_parameter_of_whole_blocks(name: str, bits: float) -> None:
    shape = shape_of((1, 1 << 20))
    assert FragmentCodec(name, shape).payload_bytes * 8 == bits * shape.element_count


@given(name=st.sampled_from(["none", "bf16", "int8", "int4"]), seed=st.integers(0, 1000))
def test_what_was_decoded_encodes_to_itself(name: str, seed: int) -> None:
    shape = shape_of((3, 300), (1, 77), small=5, buffers=2)
    codec = FragmentCodec(name, shape)
    once = codec.decode(codec.encode(vector("normal", shape.element_count, seed)))
    again = codec.decode(codec.encode(once))
    assert np.allclose(again, once, rtol=2**-7, atol=0)


@given(seed=st.integers(0, 1000))
def test_one_bit_of_what_was_decoded_is_the_same_again(seed: int) -> None:
    shape = shape_of((3, 300), (1, 77), small=5, buffers=2)
    codec = FragmentCodec("1-bit", shape)
    payload = codec.encode(vector("normal", shape.element_count, seed))
    assert np.array_equal(codec.encode(codec.decode(payload)), payload)


@given(name=NAMES, shape=shapes(), size=st.integers(0, 50_000))
def test_any_other_payload_size_is_refused(name: str, shape: FragmentShape, size: int) -> None:
    codec = FragmentCodec(name, shape)
    if size == codec.payload_bytes:
        size += 1
    with pytest.raises(FrameError, match="the payload has"):
        codec.decode(np.zeros(size, np.uint8))


def test_a_wrong_payload_size_is_refused_before_the_values_are_allocated() -> None:
    codec = FragmentCodec("1-bit", shape_of((1, 4096), small=1))
    object.__setattr__(codec.shape, "small_count", 1 << 60)  # whoever allocates for this shape fails loudly
    with pytest.raises(FrameError, match="512"):
        codec.check_size(512)
    with pytest.raises(FrameError):
        codec.decode(np.zeros(512, np.uint8))


@pytest.mark.parametrize("name", ["", "3-bit", "1-BIT", "fp32", "top-k"])
def test_an_unknown_codec_is_an_error_with_its_own_code_and_never_full_precision(name: str) -> None:
    for make in (FragmentCodec, NumpyVectors().codec):
        with pytest.raises(CodecUnavailableError, match="there is no codec") as caught:
            make(name, shape_of((1, 8)))
        assert caught.value.code == "CIUIC-106"
        assert all(known in caught.value.cause for known in CODEC_NAMES)


@settings(max_examples=30)
@given(name=NAMES, shape=shapes(), data=st.data())
def test_garbage_of_the_right_size_decodes_without_an_error_or_a_warning(
    name: str, shape: FragmentShape, data: st.DataObject
) -> None:
    codec = FragmentCodec(name, shape)
    seed = data.draw(st.integers(0, 2**32 - 1))
    payload = np.random.default_rng(seed).integers(0, 256, codec.payload_bytes, np.uint8)
    assert codec.decode(payload).shape == (shape.element_count,)


def test_a_payload_in_the_middle_of_a_frame_may_lie_at_any_address() -> None:
    shape = shape_of((3, 300), (1, 77), small=5, buffers=2)
    for name in CODEC_NAMES:
        codec = FragmentCodec(name, shape)
        payload = codec.encode(vector("normal", shape.element_count))
        for offset in range(1, 5):
            moved = np.frombuffer(b"\0" * offset + payload.tobytes(), np.uint8)[offset:]
            assert same_bits(codec.decode(moved), codec.decode(payload))

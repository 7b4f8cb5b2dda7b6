"""A frame is read only if every bit of it is as it was written."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import FrameError
from ciuic.ledger.frame import (
    CHECKSUM_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    build_frame,
    frame_bytes,
    read_frame,
    split_frames,
)

KINDS = st.sampled_from(["push", "entry", "snapshot", "record"])
BYTES = st.binary(max_size=60)
PREFIX = struct.Struct("<6sBBIQ")


@given(kind=KINDS, header=BYTES, payload=BYTES)
def test_what_was_built_is_read(kind, header: bytes, payload: bytes) -> None:
    data = build_frame(kind, header, payload)
    assert len(data) == PREFIX_BYTES + len(header) + len(payload) + CHECKSUM_BYTES == frame_bytes(data, kind)
    for form in (data, bytearray(data), memoryview(data)):
        frame = read_frame(form, kind)
        assert bytes(frame.header) == header
        assert bytes(frame.payload) == payload


@given(kind=KINDS, header=BYTES, payload=BYTES, place=st.integers(0), bit=st.integers(0, 7))
def test_any_flipped_bit_is_seen(kind, header: bytes, payload: bytes, place: int, bit: int) -> None:
    data = bytearray(build_frame(kind, header, payload))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(FrameError) as caught:
        read_frame(bytes(data), kind)
    assert caught.value.code == "CIUIC-401"


def test_every_flipped_bit_of_one_frame_is_seen() -> None:
    data = build_frame("push", b"head", b"body")
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(FrameError):
            read_frame(broken, "push")


@given(kind=KINDS, header=BYTES, payload=BYTES, keep=st.integers(0))
def test_any_cut_is_seen(kind, header: bytes, payload: bytes, keep: int) -> None:
    data = build_frame(kind, header, payload)
    with pytest.raises(FrameError, match="cut"):
        read_frame(data[: keep % len(data)], kind)


@given(kind=KINDS, header=BYTES, payload=BYTES, more=st.binary(min_size=1, max_size=40))
def test_any_extension_is_seen(kind, header: bytes, payload: bytes, more: bytes) -> None:
    with pytest.raises(FrameError, match="too long"):
        read_frame(build_frame(kind, header, payload) + more, kind)


@given(kind=KINDS, other=KINDS, payload=BYTES)
def test_a_frame_of_another_kind_is_refused(kind, other, payload: bytes) -> None:
    data = build_frame(kind, b"", payload)
    if other == kind:
        read_frame(data, other)
    else:
        with pytest.raises(FrameError, match=f"not a {other}"):
            read_frame(data, other)


@given(data=st.binary(max_size=100))
def test_bytes_from_anywhere_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        read_frame(data, "push")


def test_a_frame_of_a_later_format_says_so() -> None:
    with pytest.raises(FrameError, match="format 2, this version of ciuic reads format 1"):
        read_frame(PREFIX.pack(b"CIUICF", 2, 1, 0, 0) + bytes(8), "push")


@pytest.mark.parametrize(
    ("header_bytes", "payload_bytes"),
    [(MAX_HEADER_BYTES + 1, 0), (2**32 - 1, 0), (0, 2**64 - 1), (MAX_HEADER_BYTES, 2**63), (5, 1 << 40)],
)
def test_a_prefix_that_claims_too_much_is_refused_before_anything_is_allocated(
    header_bytes: int, payload_bytes: int
) -> None:
    data = PREFIX.pack(b"CIUICF", 1, 1, header_bytes, payload_bytes) + bytes(100)
    with pytest.raises(FrameError, match=r"claims|cut"):
        read_frame(data, "push")
    with pytest.raises(FrameError):
        list(split_frames(data, "push"))


def test_a_header_over_the_limit_is_not_built() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        build_frame("push", bytes(MAX_HEADER_BYTES + 1))


@given(parts=st.lists(BYTES, max_size=6))
def test_frames_that_lie_one_after_the_other_are_split(parts: list[bytes]) -> None:
    frames = [build_frame("entry", b"h", part) for part in parts]
    found = list(split_frames(b"".join(frames), "entry"))
    assert [bytes(f) for f in found] == frames


@given(parts=st.lists(BYTES, min_size=1, max_size=4), cut=st.integers(1))
def test_a_cut_last_frame_of_several_is_an_error_after_the_whole_ones(parts: list[bytes], cut: int) -> None:
    frames = [build_frame("entry", b"h", part) for part in parts]
    data = b"".join(frames)
    data = data[: len(data) - 1 - (cut - 1) % (len(frames[-1]) - 1)]
    parts_found = split_frames(data, "entry")
    assert [bytes(next(parts_found)) for _ in frames[:-1]] == frames[:-1]
    with pytest.raises(FrameError, match="cut"):
        next(parts_found)

"""What bodies are announced with: checked before anything is allocated."""

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import FrameError
from ciuic.net.chunks import (
    CHUNK_BYTES,
    ChunkList,
    Manifest,
    decode_manifest,
    encode_manifest,
    from_ranges,
    manifest_of,
    strong_digest,
    to_ranges,
)

BODY = os.urandom(2 * CHUNK_BYTES + 1)


def test_a_manifest_names_every_chunk_and_comes_back_as_it_was() -> None:
    manifest = manifest_of(BODY, "push", 3)
    assert manifest.count == 3
    assert [manifest.span(i) for i in (0, 2)] == [(0, CHUNK_BYTES), (2 * CHUNK_BYTES, len(BODY))]
    assert all(manifest.holds(i, memoryview(BODY)[slice(*manifest.span(i))]) for i in range(3))
    assert decode_manifest(encode_manifest(manifest)[4:], len(BODY)) == manifest
    assert manifest.id == manifest_of(memoryview(BODY), "push", 3).id != manifest_of(BODY, "push", 4).id


@pytest.mark.parametrize(
    "change",
    [
        {"total_bytes": 0},
        {"total_bytes": 1 << 60},
        {"chunk_bytes": 1},
        {"chunk_bytes": 1 << 40},
        {"digests": b"short"},
        {"fragment": -1},
    ],
)
def test_an_impossible_manifest_is_refused(change: dict[str, object]) -> None:
    wrong = msgspec.structs.replace(manifest_of(BODY, "push", 0), **change)
    with pytest.raises(FrameError):
        decode_manifest(encode_manifest(wrong)[4:], len(BODY))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(raw: bytes) -> None:
    with pytest.raises(FrameError):
        decode_manifest(raw, 1 << 20)


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_exactly_the_numbers(numbers: set[int]) -> None:
    assert from_ranges(to_ranges(sorted(numbers)), 61) == sorted(numbers)


def test_ranges_outside_the_body_are_refused() -> None:
    with pytest.raises(FrameError):
        from_ranges([(0, 5)], 4)


def test_a_list_of_chunks_for_another_file_is_refused() -> None:
    good = ChunkList(total_bytes=5, chunk_bytes=CHUNK_BYTES, digests=strong_digest(b"12345"))
    good.check(5)
    assert good.holds(0, b"12345")
    assert not good.holds(0, b"12346")
    for wrong in (
        msgspec.structs.replace(good, digests=""),
        msgspec.structs.replace(good, chunk_bytes=1),
        msgspec.structs.replace(good, total_bytes=6),
    ):
        with pytest.raises(FrameError):
            wrong.check(5)


def test_a_body_of_one_chunk_has_its_whole_content_as_id() -> None:
    assert isinstance(manifest_of(b"x", "snapshot", 0), Manifest)
    assert manifest_of(b"x", "snapshot", 0).id != manifest_of(b"y", "snapshot", 0).id

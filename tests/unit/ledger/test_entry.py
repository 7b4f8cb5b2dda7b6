"""Pushes, entries and snapshots: read back as written, refused in any other form."""

from typing import Any

import msgspec
import numpy as np
import pytest
from codec_cases import same_bits, vector
from hypothesis import given
from hypothesis import strategies as st
from ledger_frames import RUN, aggregator, close_round, push_header, push_of

from ciuic.errors import FrameError
from ciuic.ledger.entry import (
    MAX_RANGES,
    MAX_TOKENS,
    Entry,
    EntryHeader,
    Push,
    Rejection,
    Snapshot,
    base_digest,
    entry_from_frame,
    push_from_frame,
    snapshot_from_frame,
)
from ciuic.ledger.frame import build_frame

NUMBERS = st.integers(0, 2**40)
RANGES = st.lists(st.tuples(NUMBERS, st.integers(1, 50)).map(lambda r: (r[0], r[0] + r[1])), max_size=4).map(tuple)


@given(sequence=NUMBERS, tokens=st.integers(1, MAX_TOKENS), ranges=RANGES, counter=st.integers(-(2**63), 2**63 - 1))
def test_a_push_is_read_as_it_was_written(
    sequence: int, tokens: int, ranges: tuple[tuple[int, int], ...], counter: int
) -> None:
    push = push_of(sequence=sequence, tokens=tokens, ranges=ranges, counters=(counter, 0))
    again = push_from_frame(push.to_frame())
    assert again.header == push.header
    assert np.array_equal(again.payload, push.payload)
    assert again.key == ("n0", 1, sequence)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 0},
        {"tokens": -1},
        {"tokens": MAX_TOKENS + 1},
        {"sequence": -1},
        {"incarnation": -1},
        {"base_version": -1},
        {"ranges": ((5, 5),)},
        {"ranges": ((5, 4),)},
        {"ranges": ((-1, 4),)},
        {"ranges": ((0, 1),) * (MAX_RANGES + 1)},
        {"counters": (2**63, 0)},
        {"counters": (0, -(2**63) - 1)},
        {"accesses": -2},
        {"accesses": MAX_TOKENS + 1},
    ],
    ids=str,
)
def test_a_push_whose_numbers_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    try:
        frame = push_of(**changes).to_frame()
    except OverflowError:
        return  # cannot even be written
    with pytest.raises(FrameError, match="cannot be"):
        push_from_frame(frame)


def push_with(body: dict[str, Any]) -> bytes:
    return build_frame("push", msgspec.msgpack.encode(body), bytes(push_of().payload))


def test_a_push_with_an_unknown_missing_or_mistyped_field_is_refused() -> None:
    good = msgspec.to_builtins(push_header())
    push_from_frame(push_with(good))
    for bad in ({**good, "colour": 1}, {k: v for k, v in good.items() if k != "node"}, {**good, "tokens": "10"}):
        with pytest.raises(FrameError, match="header of this push is not valid"):
            push_from_frame(push_with(bad))


@given(header=st.binary(max_size=40))
def test_a_header_that_is_no_message_is_refused(header: bytes) -> None:
    for kind, read in (("push", push_from_frame), ("entry", entry_from_frame)):
        with pytest.raises(FrameError):
            read(build_frame(kind, header, b""))  # type: ignore[arg-type]
    with pytest.raises(FrameError):
        snapshot_from_frame(build_frame("snapshot", header, b""), 4)


def test_an_entry_says_what_became_of_each_push() -> None:
    merged, waits = push_of(node="n1", sequence=7), push_of(node="n1", sequence=8)
    entry = close_round(aggregator(), [merged, push_of(node="n0")])
    header = msgspec.structs.replace(
        entry.header, rejected=(Rejection(node="n2", incarnation=3, sequence=4, reason="stale"),)
    )
    again = entry_from_frame(Entry(header=header, payload=entry.payload).to_frame())
    assert again.header == header
    assert np.array_equal(again.payload, entry.payload)
    assert again.outcome(*merged.key) == "merged"
    assert again.outcome(*waits.key) == "absent"
    assert again.outcome("n2", 3, 4) == "rejected"
    assert again.outcome("n2", 4, 4) == "absent"


def test_an_entry_with_an_unknown_reason_or_field_is_refused() -> None:
    entry = close_round(aggregator(), [push_of()])
    good = msgspec.to_builtins(entry.header)
    bad_reason = {**good, "rejected": [{"node": "n", "incarnation": 1, "sequence": 1, "reason": "dislike"}]}
    for bad in (bad_reason, {**good, "more": 1}, {**good, "contributors": [{"node": "n0"}]}):
        with pytest.raises(FrameError, match="header of this entry is not valid"):
            entry_from_frame(build_frame("entry", msgspec.msgpack.encode(bad), b""))
    assert isinstance(entry.header, EntryHeader)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_snapshot_is_read_as_it_was_written_also_from_an_odd_address(momentum: float) -> None:
    hub = aggregator(momentum=momentum)
    close_round(hub, [push_of()])
    snapshot = hub.snapshot(RUN)
    frame = snapshot.to_frame()
    for offset in range(5):
        moved = memoryview(b"\0" * offset + frame)[offset:]
        again = snapshot_from_frame(moved, hub.element_count)
        assert again.header == snapshot.header
        assert again.vectors.keys() == snapshot.vectors.keys()
        for part, values in snapshot.vectors.items():
            assert same_bits(again.vectors[part].copy(), values)


@pytest.mark.parametrize("count", [0, 1, 84, 86, 1 << 40])
def test_a_snapshot_of_another_size_is_refused(count: int) -> None:
    hub = aggregator()
    assert hub.element_count == 85
    with pytest.raises(FrameError, match="the snapshot has"):
        snapshot_from_frame(hub.snapshot(RUN).to_frame(), count)


def test_a_snapshot_with_a_part_that_is_not_known_is_refused() -> None:
    header = msgspec.to_builtins(aggregator().snapshot(RUN).header)
    body = msgspec.msgpack.encode({**header, "parts": ["base", "third"]})
    with pytest.raises(FrameError, match="header of this snapshot is not valid"):
        snapshot_from_frame(build_frame("snapshot", body, b""), 0)


@given(place=st.integers(0), bit=st.integers(0, 7))
def test_any_flipped_bit_in_any_message_is_refused(place: int, bit: int) -> None:
    hub = aggregator()
    count = hub.element_count
    snapshot, push = hub.snapshot(RUN), push_of()
    entry = close_round(hub, [push])
    for frame, read in (
        (push.to_frame(), push_from_frame),
        (entry.to_frame(), entry_from_frame),
        (snapshot.to_frame(), lambda data: snapshot_from_frame(data, count)),
    ):
        data = bytearray(frame)
        data[place % len(data)] ^= 1 << bit
        with pytest.raises(FrameError) as caught:
            read(bytes(data))
        assert caught.value.code == "CIUIC-401"


@given(seed=st.integers(0, 99), place=st.integers(0, 84), bit=st.integers(0, 31), counter=st.integers(1, 5))
def test_the_digest_of_a_base_sees_every_bit_and_every_counter(seed: int, place: int, bit: int, counter: int) -> None:
    values = vector("normal", 85, seed)
    digest = base_digest(values, (1, 2))
    assert digest == base_digest(values.copy(), (1, 2))
    assert len(digest) == 32
    assert base_digest(values, (1, 2 + counter)) != digest
    assert base_digest(values, (1,)) != digest
    values.view(np.uint32)[place] ^= np.uint32(1 << bit)
    assert base_digest(values, (1, 2)) != digest


def test_frames_of_pushes_and_snapshots_do_not_depend_on_who_builds_them() -> None:
    push = push_of()
    assert Push(header=push.header, payload=push.payload.copy()).to_frame() == push.to_frame()
    snapshot = aggregator().snapshot(RUN)
    assert Snapshot(header=snapshot.header, vectors=dict(snapshot.vectors)).to_frame() == snapshot.to_frame()

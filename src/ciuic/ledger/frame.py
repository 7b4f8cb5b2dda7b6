"""The binary frame of pushes, entries, snapshots and journal records: one versioned header, one payload, one checksum.

    magic "CIUICF" | format u8 | kind u8 | header bytes u32 | payload bytes u64 | header (msgpack) | payload | xxh3 u64

Little-endian. Sizes are checked before anything is allocated; a flipped bit or a cut is always seen.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash

from ciuic.errors import FrameError

_PREFIX = struct.Struct("<6sBBIQ")
PREFIX_BYTES = _PREFIX.size
CHECKSUM_BYTES = 8
_MAGIC = b"CIUICF"
_FORMAT = 1
MAX_HEADER_BYTES = 16 << 20
Kind = Literal["push", "entry", "snapshot", "record", "machine"]
_KINDS: dict[str, int] = {"push": 1, "entry": 2, "snapshot": 3, "record": 4, "machine": 5}
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A checked frame; header and payload are views into the bytes it was read from."""

    header: memoryview
    payload: memoryview


def build_frame(kind: Kind, header: bytes, payload: Buffer = b"") -> bytes:
    """One frame as bytes."""
    return b"".join(frame_parts(kind, header, [payload]))


def frame_parts(kind: Kind, header: bytes, payload: Sequence[Buffer]) -> list[Buffer]:
    """One frame as the pieces it consists of, so that a large payload need not be copied to be written."""
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError(f"the header of this {kind} has {len(header)} bytes, over the limit of {MAX_HEADER_BYTES}")
    payload_bytes = sum(memoryview(part).nbytes for part in payload)
    parts: list[Buffer] = [_PREFIX.pack(_MAGIC, _FORMAT, _KINDS[kind], len(header), payload_bytes), header, *payload]
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return [*parts, checksum.intdigest().to_bytes(8, "little")]


def frame_bytes(prefix: Buffer, kind: Kind) -> int:
    """Whole size of a frame from its first PREFIX_BYTES bytes. Raises FrameError when it is no frame of that kind."""
    if len(prefix) < PREFIX_BYTES:
        raise FrameError(f"the {kind} is cut inside its first {PREFIX_BYTES} bytes", next="send it again")
    magic, version, found, header_bytes, payload_bytes = _PREFIX.unpack_from(prefix)
    if magic != _MAGIC or found != _KINDS[kind]:
        raise FrameError(f"this is not a {kind} of ciuic", cause=f"it starts with {bytes(prefix[:8])!r}")
    if version != _FORMAT:
        raise FrameError(
            f"the {kind} has format {version}, this version of ciuic reads format {_FORMAT}",
            next="use the same version of ciuic on both sides",
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise FrameError(f"the header of the {kind} claims {header_bytes} bytes, the limit is {MAX_HEADER_BYTES}")
    return PREFIX_BYTES + header_bytes + payload_bytes + CHECKSUM_BYTES


def read_frame(data: Buffer, kind: Kind) -> Frame:
    """Check and open exactly one frame. Raises FrameError: another kind, cut, too long, or a bit flipped."""
    expected = frame_bytes(data, kind)
    if len(data) != expected:
        how = "cut" if len(data) < expected else "too long"
        raise FrameError(
            f"the {kind} is {how}: {len(data)} bytes instead of {expected}",
            cause="the transfer was interrupted or the file is damaged",
            next="send it again",
        )
    view = memoryview(data)
    body, stored = view[:-CHECKSUM_BYTES], int.from_bytes(view[-CHECKSUM_BYTES:], "little")
    if xxhash.xxh3_64_intdigest(body) != stored:
        raise FrameError(
            f"the checksum of the {kind} is wrong",
            cause="at least one bit changed on the way or on the disk",
            next="send it again",
        )
    _, _, _, header_bytes, _ = _PREFIX.unpack_from(view)
    return Frame(header=body[PREFIX_BYTES : PREFIX_BYTES + header_bytes], payload=body[PREFIX_BYTES + header_bytes :])


def find_frame(data: bytes, kind: Kind, *, start: int) -> int | None:
    """Where the first whole, undamaged frame begins at or after `start`; None when there is none."""
    view = memoryview(data)
    place = data.find(_MAGIC, start)
    while place >= 0:
        try:
            read_frame(view[place : place + frame_bytes(view[place:], kind)], kind)
        except FrameError:
            place = data.find(_MAGIC, place + 1)
        else:
            return place
    return None


def split_frames(data: Buffer, kind: Kind) -> Iterator[memoryview]:
    """Frames that lie one after the other. Raises FrameError when the last one is cut."""
    view = memoryview(data)
    while len(view):
        size = frame_bytes(view, kind)
        if len(view) < size:
            raise FrameError(f"the last {kind} of this reply is cut", next="ask again")
        yield view[:size]
        view = view[size:]

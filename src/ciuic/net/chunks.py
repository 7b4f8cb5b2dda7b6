"""A large body as chunks named by their content: what is announced, sent in any order, asked for again after a cut.

An upload's request body is

    manifest bytes u32 | manifest (msgpack) | (index u32 | that chunk's bytes) ...

in little-endian; chunks may come in any order over several connections, each of which begins with the same manifest.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import xxhash

from ciuic.errors import FrameError
from ciuic.net.messages import FragmentState, Message, PushReply

CHUNK_BYTES = 1024 * 1024
LARGE_BYTES = CHUNK_BYTES
"""Bodies from this size on go as chunks, over several connections."""
SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES = 4 * 1024, 4 * 1024 * 1024
MAX_CHUNKS = 1 << 16
DIGEST_BYTES = 16
MANIFEST_LIMIT_BYTES = DIGEST_BYTES * MAX_CHUNKS + 4096
NUMBER = struct.Struct("<I")
Buffer = bytes | bytearray | memoryview


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is uploaded: a push, or version 0 of a fragment."""

    what: Literal["push", "snapshot"]
    fragment: int
    total_bytes: int
    chunk_bytes: int
    """Of every chunk but the last, which has the rest."""
    digests: bytes
    """xxh3, 128 bit, of each chunk, one after the other."""

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.total_bytes // self.chunk_bytes)

    @property
    def id(self) -> str:
        """Hex digest: the same content has the same id."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self))

    def span(self, index: int) -> tuple[int, int]:
        """[start, stop) of a chunk in the body."""
        return index * self.chunk_bytes, min(self.total_bytes, (index + 1) * self.chunk_bytes)

    def holds(self, index: int, chunk: Buffer) -> bool:
        """Whether this is the chunk that was announced."""
        return xxhash.xxh3_128_digest(chunk) == self.digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]


class ChunksReply(Message):
    """The answer to an upload request, also to one that carries no chunks and only asks."""

    done: bool = False
    """The body is whole and was taken; `push` is the answer to a push."""
    missing: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of chunks that have not arrived, oldest first; empty when done."""
    push: PushReply | None = None


class ChunkList(Message):
    """What a file consists of that is downloaded: blake2b (128 bit, hex) of each chunk, one after the other.

    A source that is not the hub cannot make up other bytes with these digests.
    """

    total_bytes: int
    chunk_bytes: int
    digests: str

    @property
    def count(self) -> int:
        return -(-self.total_bytes // self.chunk_bytes)

    def span(self, index: int) -> tuple[int, int]:
        """[start, stop) of a chunk in the file."""
        return index * self.chunk_bytes, min(self.total_bytes, (index + 1) * self.chunk_bytes)

    def holds(self, index: int, chunk: Buffer) -> bool:
        """Whether this is the chunk that was announced."""
        digits = 2 * DIGEST_BYTES
        return strong_digest(chunk) == self.digests[digits * index : digits * (index + 1)]

    def check(self, total_bytes: int) -> None:
        """Raises FrameError when it does not describe a file of that size."""
        sane = self.total_bytes == total_bytes > 0 and SMALLEST_CHUNK_BYTES <= self.chunk_bytes <= LARGEST_CHUNK_BYTES
        if not sane or self.count > MAX_CHUNKS or len(self.digests) != 2 * DIGEST_BYTES * self.count:
            raise FrameError(
                f"the list of chunks is for {self.total_bytes} bytes, {total_bytes} were announced",
                next="ask the hub for the current snapshot again",
            )


def list_in(state: FragmentState) -> ChunkList | None:
    """What the answer to an attachment says of the snapshot's chunks; None when it is too large to be listed there."""
    if not state.chunk_bytes:
        return None
    return ChunkList(total_bytes=state.snapshot_bytes, chunk_bytes=state.chunk_bytes, digests=state.chunks)


def strong_digest(chunk: Buffer) -> str:
    """blake2b, 128 bit, hex."""
    return hashlib.blake2b(chunk, digest_size=DIGEST_BYTES).hexdigest()


def manifest_of(body: Buffer, what: Literal["push", "snapshot"], fragment: int, chunk_bytes: int = 0) -> Manifest:
    """Announce a body, in chunks of the usual size or of this one. Its bytes are read once, nothing is copied."""
    view = memoryview(body).cast("B")
    size = max(SMALLEST_CHUNK_BYTES, chunk_bytes) if chunk_bytes else chunk_size(len(view))
    digests = b"".join(xxhash.xxh3_128_digest(view[at : at + size]) for at in range(0, len(view), size))
    return Manifest(what=what, fragment=fragment, total_bytes=len(view), chunk_bytes=size, digests=digests)


def chunk_size(total_bytes: int) -> int:
    """1 MiB; more only for bodies that would have too many chunks."""
    size = CHUNK_BYTES
    while -(-total_bytes // size) > MAX_CHUNKS and size < LARGEST_CHUNK_BYTES:
        size *= 2
    return size


def encode_manifest(manifest: Manifest) -> bytes:
    """How an upload request begins."""
    packed = msgspec.msgpack.encode(manifest)
    return NUMBER.pack(len(packed)) + packed


def decode_manifest(packed: Buffer, limit_bytes: int) -> Manifest:
    """Check what somebody announces before anything is allocated. Raises FrameError.

    `limit_bytes`: how large the body may be.
    """
    try:
        manifest = msgspec.msgpack.decode(packed, type=Manifest)
    except msgspec.DecodeError as error:
        raise FrameError("the list of chunks is not valid", cause=str(error)) from error
    if not 0 < manifest.total_bytes <= limit_bytes:
        raise FrameError(f"a body of {manifest.total_bytes} bytes is not accepted here", cause=f"limit {limit_bytes}")
    if not SMALLEST_CHUNK_BYTES <= manifest.chunk_bytes <= LARGEST_CHUNK_BYTES or manifest.count > MAX_CHUNKS:
        raise FrameError(f"chunks of {manifest.chunk_bytes} bytes are not accepted here")
    if len(manifest.digests) != DIGEST_BYTES * manifest.count or not 0 <= manifest.fragment < 1 << 31:
        raise FrameError(f"the list of chunks does not name all of {manifest.count} chunks")
    return manifest


def to_ranges(indexes: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted numbers as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for index in indexes:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges


def from_ranges(ranges: Sequence[tuple[int, int]], count: int) -> list[int]:
    """The numbers in ranges that a peer names. Raises FrameError for numbers outside 0..count."""
    if any(not 0 <= start < stop <= count for start, stop in ranges):
        raise FrameError("the hub asks for chunks that there are not", cause=f"there are {count}")
    return [index for start, stop in ranges for index in range(start, stop)]

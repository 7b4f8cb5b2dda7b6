"""Pushes, entries and snapshots: what goes through the ledger, with all that is needed to check and replay it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ciuic.errors import FrameError
from ciuic.ledger.frame import Buffer, Kind, build_frame, frame_parts, read_frame

T = TypeVar("T", bound=msgspec.Struct)
MAX_RANGES = 100_000
MAX_TOKENS = 1 << 53
MAX_LR = 1e6
Part = Literal["base", "residual", "momentum", "delayed", "first", "second"]
Phase = Literal["adam", "frozen"]
RejectReason = Literal["stale", "ahead", "not-finite", "wrong-layout", "superseded", "quarantined"]


class StepFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an entry of `gradient` mode says about its step; see ledger.stepping."""

    lr: float
    phase: Phase = "adam"
    next_phase: Phase = "adam"
    """Of the pushes that are based on this entry's version."""


class PushHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a node says about its push."""

    run: str
    node: str
    incarnation: int
    sequence: int
    """Grows by one per push of an incarnation and fragment."""
    fragment: int
    base_version: int
    epoch: int
    tokens: int
    ranges: tuple[tuple[int, int], ...] = ()
    """Sample numbers [start, stop) trained since the last push of this fragment."""
    codec: str
    """Of this payload; it may change during a run."""
    layout_digest: str
    counters: tuple[int, ...] = ()
    lr: float = 0.0
    """The node's learning rate now, in `gradient` mode."""
    phase: Phase = "adam"
    """What was sent in `gradient` mode: a gradient, or with `frozen` a momentum."""
    accesses: int = -1
    """Tokens that were routed to the experts of this fragment, once for each of them; -1: not known."""


class Contributor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A push that is merged in an entry."""

    node: str
    incarnation: int
    sequence: int
    tokens: int
    ranges: tuple[tuple[int, int], ...] = ()
    staleness: int = 0
    """How many versions its base was behind."""
    weight: float
    """What its decoded push was multiplied with (an fp32 number)."""
    payload_bytes: int
    norm: float = 0.0
    """L2 norm of its decoded push; 0: not known."""
    clip: float = 1.0
    """Part of the weight: below 1 when the push was much longer than others."""


class Rejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An accepted push that is not merged after all."""

    node: str
    incarnation: int
    sequence: int
    reason: RejectReason


class EntryHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One version of a fragment."""

    run: str
    fragment: int
    version: int
    """The version the base has after this entry; the first entry makes version 1."""
    codec: str
    epoch: int
    contributors: tuple[Contributor, ...]
    rejected: tuple[Rejection, ...] = ()
    outer_lr: float
    outer_momentum: float
    outer_delay: int = 1
    """Entries between two steps of the outer momentum."""
    step: StepFacts | None = None
    """In `gradient` mode."""
    digest: str
    """Of the base after this entry."""
    previous_digest: str
    samples_committed: int = 0
    """Distinct samples of the run that are committed with this entry."""
    counters: tuple[int, ...] = ()
    time: float = 0.0
    """Wall clock of the hub, for people."""
    why: str = ""
    """Why the round closed: complete, deadline, pushed (async)."""
    stretch: int = 1
    """Intervals between a push that is merged here and its node's next one of this fragment, the same for all."""


class SnapshotHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """State of a fragment at a version. For nodes: base and moments; the hub's own also has residual and momentum."""

    run: str
    fragment: int
    version: int
    layout_digest: str
    digest: str
    parts: tuple[Part, ...]
    """fp32 vectors in the payload, in this order."""
    counters: tuple[int, ...] = ()
    phase: Phase = "adam"


@dataclass(frozen=True, kw_only=True)
class Push:
    """A checked push."""

    header: PushHeader
    payload: NDArray[np.uint8]

    @cached_property
    def key(self) -> tuple[str, int, int]:
        """(node, incarnation, sequence): the identity of a push within a fragment, and the order of summation."""
        return self.header.node, self.header.incarnation, self.header.sequence

    def to_frame(self) -> bytes:
        return build_frame("push", msgspec.msgpack.encode(self.header), self.payload.data)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checked entry."""

    header: EntryHeader
    payload: NDArray[np.uint8]

    def to_frame(self) -> bytes:
        return build_frame("entry", msgspec.msgpack.encode(self.header), self.payload.data)

    def outcome(self, node: str, incarnation: int, sequence: int) -> Literal["merged", "rejected", "absent"]:
        """What this entry did to a push."""
        if any((c.node, c.incarnation, c.sequence) == (node, incarnation, sequence) for c in self.header.contributors):
            return "merged"
        if any((r.node, r.incarnation, r.sequence) == (node, incarnation, sequence) for r in self.header.rejected):
            return "rejected"
        return "absent"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A checked snapshot."""

    header: SnapshotHeader
    vectors: dict[Part, NDArray[np.float32]]
    """Part name -> fp32 [element_count]; read-only views."""

    def to_frame(self) -> bytes:
        return b"".join(self.frame_parts())

    def frame_parts(self) -> list[Buffer]:
        """The frame in pieces, of which the vectors are not copied."""
        vectors = [np.ascontiguousarray(self.vectors[part]).view(np.uint8).data for part in self.header.parts]
        return frame_parts("snapshot", msgspec.msgpack.encode(self.header), vectors)


def push_from_frame(data: Buffer) -> Push:
    """Raises FrameError."""
    header, payload = _open(data, "push", PushHeader)
    if len(header.ranges) > MAX_RANGES or any(not 0 <= a < b for a, b in header.ranges):
        raise FrameError(
            "the sample ranges of this push cannot be", cause="each must be [start, stop) with start < stop"
        )
    if not 0 <= header.lr <= MAX_LR:  # also when it is not a number
        raise FrameError("the learning rate of this push cannot be", cause=f"{header.lr}")
    if not 0 < header.tokens <= MAX_TOKENS or min(header.base_version, header.sequence, header.incarnation) < 0:
        raise FrameError(
            "the numbers of this push cannot be", cause=f"tokens {header.tokens}, sequence {header.sequence}"
        )
    if not -1 <= header.accesses <= MAX_TOKENS:
        raise FrameError("the accesses of this push cannot be", cause=f"{header.accesses}")
    _check_counters(header.counters)
    return Push(header=header, payload=payload)


def entry_from_frame(data: Buffer) -> Entry:
    """Raises FrameError."""
    header, payload = _open(data, "entry", EntryHeader)
    return Entry(header=header, payload=payload)


def snapshot_from_frame(data: Buffer, element_count: int) -> Snapshot:
    """Raises FrameError, also when the vectors are not of `element_count` elements."""
    header, payload = _open(data, "snapshot", SnapshotHeader)
    if len(payload) != 4 * element_count * len(header.parts):
        raise FrameError(
            f"the snapshot has {len(payload)} bytes, {len(header.parts)} vectors of this fragment have "
            f"{4 * element_count * len(header.parts)}",
            cause="it belongs to another model",
            next="check that both sides run the same job",
        )
    values = payload.view(np.float32) if payload.ctypes.data % 4 == 0 else payload.copy().view(np.float32)
    _check_counters(header.counters)
    vectors = {part: values[i * element_count : (i + 1) * element_count] for i, part in enumerate(header.parts)}
    return Snapshot(header=header, vectors=vectors)


def _check_counters(counters: tuple[int, ...]) -> None:
    if any(not -(1 << 63) <= value < 1 << 63 for value in counters):
        raise FrameError("these counters cannot be", cause="an integer buffer holds at most 64 bits")


def _open(data: Buffer, kind: Kind, header_type: type[T]) -> tuple[T, NDArray[np.uint8]]:
    frame = read_frame(data, kind)
    try:
        header: Any = msgspec.msgpack.decode(frame.header, type=header_type)
    except msgspec.DecodeError as error:
        raise FrameError(f"the header of this {kind} is not valid", cause=str(error)) from error
    return header, np.frombuffer(frame.payload, np.uint8)


def base_digest(values: NDArray[np.float32], counters: tuple[int, ...] = ()) -> str:
    """Hex digest (xxh3, 128 bit) of a base: the fp32 bytes and the counters."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(values).data)
    digest.update(np.array(counters, "<i8").tobytes())
    return digest.hexdigest()

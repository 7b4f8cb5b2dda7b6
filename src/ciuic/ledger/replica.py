"""The node's machine of one fragment: push, merge, reject. Pure: no sockets, no clock.

    base  fp32, bit-identical everywhere at a version
    e     residual: what compression dropped, kept for the next push
    F     own pushed, unmerged progress: 0 or -d
    p     = theta - base - F: progress since the last push

The progress of each step sits in exactly one of {p, F, base via q, e}. theta belongs to the caller, as one flat
vector of the same back end.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ciuic.codec import Vectors
from ciuic.codec.vectors import VectorCodec
from ciuic.errors import ConflictError, DigestMismatchError, NonFiniteError, ProtocolError
from ciuic.ledger.entry import Entry, base_digest
from ciuic.ledger.intervals import Range
from ciuic.ledger.layout import Layout

MINUS_ONE = np.float32(-1)


@dataclass(kw_only=True)
class InFlight:
    """The one push of this fragment that has not come back in an entry."""

    sequence: int
    codec: str
    payload: NDArray[np.uint8]
    base_version: int
    tokens: int
    ranges: tuple[Range, ...]
    accesses: int = -1


@dataclass(kw_only=True)
class Progress:
    """Work since the last push of this fragment."""

    tokens: int = 0
    ranges: list[Range] = field(default_factory=list)
    accesses: int | None = None
    """Tokens routed to the experts of this fragment; None: nothing was said, -1: not known."""

    def accessed(self, count: int) -> None:
        """So many tokens more reached the experts of this fragment; -1 when that is not known."""
        self.accesses = -1 if count < 0 or self.accesses == -1 else (self.accesses or 0) + count

    def add(self, tokens: int, ranges: tuple[Range, ...] | list[Range]) -> None:
        self.tokens += tokens
        for start, stop in ranges:
            if self.ranges and self.ranges[-1][1] == start:
                self.ranges[-1] = (self.ranges[-1][0], stop)
            else:
                self.ranges.append((start, stop))

    def take_off(self, sequence: int, *, codec: str, payload: NDArray[np.uint8], version: int) -> InFlight:
        """A push of all this work, based on `version`."""
        return InFlight(
            sequence=sequence,
            codec=codec,
            payload=payload,
            base_version=version,
            tokens=self.tokens,
            ranges=tuple(self.ranges),
            accesses=-1 if self.accesses is None else self.accesses,
        )


class Replica:
    """State of one fragment on a node."""

    def __init__(self, layout: Layout, fragment: int, vectors: Vectors, codec_up: str) -> None:
        """`codec_up`: of this node's next pushes; it may be changed. Entries say which codec they have."""
        self.layout, self.fragment, self.vectors = layout, fragment, vectors
        self.codec_up = codec_up
        self._shape = shape = layout.fragment_shape(fragment)
        self._codecs: dict[str, VectorCodec] = {}
        self.base: Any = vectors.zeros(shape.element_count)
        self.e: Any = vectors.zeros(shape.element_count)
        self.e_before: Any = vectors.zeros(shape.element_count)
        """While a push is in flight: the residual before it."""
        self.F: Any = vectors.zeros(shape.element_count)
        self.version = 0
        self.digest = ""
        self.residual = 0.0
        """Length of the residual after the latest push, over the length of what was to be pushed."""
        self.counters: tuple[int, ...] = ()
        self.in_flight: InFlight | None = None
        self.progress = Progress()
        self.has_stepped = False
        """Whether theta moved since the last push; else p is exactly 0."""

    def _codec(self, name: str) -> VectorCodec:
        if name not in self._codecs:
            self._codecs[name] = self.vectors.codec(name, self._shape)
        return self._codecs[name]

    def load(self, base: NDArray[np.float32], version: int, counters: tuple[int, ...] = ()) -> Any:
        """Start from a base; returns theta (a copy of it). Residual and unmerged progress are gone."""
        self.base = self.vectors.from_host(base)
        self.e, self.e_before, self.F = (self.vectors.zeros(len(base)) for _ in range(3))
        self.version, self.counters = version, counters
        self.digest = base_digest(base, counters)
        self.in_flight, self.progress, self.has_stepped = None, Progress(), False
        return self.vectors.copy(self.base)

    @property
    def base_vector(self) -> Any:
        """The base as a vector of theta's back end."""
        return self.base

    def stepped(self, tokens: int, ranges: tuple[Range, ...] | list[Range] = ()) -> None:
        """theta has moved by inner steps over these tokens and samples."""
        self.progress.add(tokens, ranges)
        self.has_stepped = True

    def push(self, theta: Any, sequence: int) -> InFlight:
        """Encode the progress since the last push. theta does not move.

        Raises NonFiniteError (the residual is untouched: load the base again) and ConflictError when a push is in
        flight or there is nothing to push.
        """
        if self.in_flight is not None or self.progress.tokens <= 0:
            raise ConflictError("there is nothing to push now", cause="a push is in flight, or no token was trained")
        codec = self._codec(self.codec_up)
        self.F[:] = theta
        self.F -= self.base  # it was 0; now it is -d
        payload, bad = codec.compress(self.F, self.e, self.e_before)
        if bad is not None:
            self.F[:] = 0
            raise NonFiniteError(
                f"training produced a non-finite value in {self.layout.name_at(self.fragment, bad)}",
                cause="the loss diverged or overflowed on this node",
                next="lower the learning rate or use bf16 instead of fp16; this node goes on from the base",
            )
        self.e, self.e_before = self.e_before, self.e
        self.residual = _over(self.e, self.F)
        self.in_flight = self.progress.take_off(sequence, codec=self.codec_up, payload=payload, version=self.version)
        self.progress, self.has_stepped = Progress(), False
        return self.in_flight

    def discard(self, theta: Any) -> list[Range]:
        """Give up the progress since the last push (it is not finite): theta = base + F. Returns its samples."""
        lost, self.progress, self.has_stepped = self.progress, Progress(), False
        theta[:] = self.base
        theta += self.F
        return lost.ranges

    def merge(self, entry: Entry, theta: Any, *, outcome: Literal["merged", "rejected", "absent"]) -> None:
        """Apply the next entry; theta (flat, in place) keeps every step made meanwhile.

        `outcome`: what the entry did to the push in flight. Raises ProtocolError or DigestMismatchError before
        anything changes when the entry is not the next one, and DigestMismatchError after it when the result differs
        from the hub's (then a snapshot must be loaded).
        """
        header = entry.header
        check_next(self, entry)
        codec = self._codec(header.codec)
        codec.check_size(len(entry.payload))
        assign = not self.has_stepped and (self.in_flight is None or outcome == "merged")
        if not assign:
            theta -= self.base
            theta -= self.F
        codec.accumulate(entry.payload, MINUS_ONE, self.base)  # base -= decode(entry)
        if self.in_flight is not None and outcome != "absent":
            self._settle(merged=outcome == "merged", p=theta)
        if assign:
            theta[:] = self.base
        else:
            theta += self.base
            theta += self.F
        digest = base_digest(self.vectors.to_host(self.base), header.counters)
        self.version, self.counters, self.digest = header.version, header.counters, digest  # together: others look
        check_result(self, entry)

    def reject(self) -> None:
        """The push in flight was refused: its progress is unpushed again, nothing is lost. theta does not move."""
        if self.in_flight is not None:
            self._settle(merged=False, p=None)

    def _settle(self, *, merged: bool, p: Any) -> None:
        """End the flight. `p` (in place): a rejected push is progress since the last push again: p += F = -d."""
        flight = self.in_flight
        if flight is None:
            return
        if not merged:
            if p is not None:
                p += self.F
            self.e, self.e_before = self.e_before, self.e  # as it was before the push
            again = Progress()
            again.add(flight.tokens, flight.ranges)
            again.accessed(flight.accesses)
            again.add(self.progress.tokens, self.progress.ranges)
            self.progress, self.has_stepped = again, True
        self.F[:] = 0
        self.in_flight = None


def _over(residual: Any, pushed: Any) -> float:
    """How long one vector is in lengths of another; 0 when that has none."""
    square = float(pushed @ pushed)
    return math.sqrt(float(residual @ residual) / square) if square > 0 else 0.0


class Versioned(Protocol):
    """A replica of either mode at a version."""

    fragment: int
    version: int
    digest: str


def check_next(replica: Versioned, entry: Entry) -> None:
    """Whether an entry may be applied now. Raises ProtocolError, DigestMismatchError."""
    header = entry.header
    if (header.fragment, header.version) != (replica.fragment, replica.version + 1):
        raise ProtocolError(
            f"entry {header.version} of fragment {header.fragment} is not the next one",
            cause=f"this replica is at version {replica.version} of fragment {replica.fragment}",
        )
    if header.previous_digest != replica.digest:
        raise DigestMismatchError(
            f"version {replica.version} has another digest here than on the hub",
            cause=f"{replica.digest[:12]} here, {header.previous_digest[:12]} there",
            next="the node loads a snapshot again",
        )


def check_result(replica: Versioned, entry: Entry) -> None:
    """Whether the entry made the hub's base here too. Raises DigestMismatchError."""
    if replica.digest != entry.header.digest:
        raise DigestMismatchError(
            f"version {replica.version} came out different here",
            cause=f"{replica.digest[:12]} here, {entry.header.digest[:12]} on the hub",
            next="the node loads a snapshot again; if it happens twice, check this machine's memory and libraries",
        )

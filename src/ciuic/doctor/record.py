"""What travels between a rank and the collector: small messages, msgpack, each behind its length.

A rank says hello once, sends a record for each sampled step, a notice for each rare event, a beat each second, and bye.
The collector sends questions (which parameter differs?) and the schedule of the samples. Facts are named numbers,
texts, digests and short lists of them; each name is a constant beside the code that makes it.
"""

import struct
from typing import Any

import msgspec

from ciuic.errors import FrameError

MAX_FRAME_BYTES = 1 << 20
"""Longer frames are refused before anything is allocated for them."""
PROBE_FAILED = "probe_failed"
"""Kind of a notice: a part of the probe is off from here on. Facts: `part`, `event`, `error`."""
DROPPED = "dropped"
"""Fact of a beat: messages of this rank so far that did not get out."""
_LENGTH = struct.Struct("!I")

Facts = dict[str, Any]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", array_like=True):
    """The first message of a rank; a wrong token ends the connection."""

    token: str
    rank: int
    world: int
    host: str
    pid: int
    facts: Facts = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="record", array_like=True):
    """One sampled step of one optimizer on one rank."""

    rank: int
    optimizer: int
    """In the order in which they made their first step."""
    step: int
    """Attempts of this optimizer so far, from 1: steps that a gradient scaler skipped count too."""
    time_s: float
    """Of the rank's clock, seconds since the epoch."""
    facts: Facts


class Notice(msgspec.Struct, frozen=True, kw_only=True, tag="notice", array_like=True):
    """A rare event on one rank, as soon as it happens."""

    rank: int
    step: int
    """Of the rank's first optimizer, at that moment; 0 before the first."""
    kind: str
    facts: Facts


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat", array_like=True):
    """Sign of life from the rank's own thread, even while its main thread waits."""

    rank: int
    step: int
    time_s: float
    phase: str
    """What the main thread does: start, data, forward, backward, step, collective, save, load, other, end."""
    phase_s: float
    """Since when, in seconds."""
    facts: Facts


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer", array_like=True):
    """To one question; facts are empty when the rank does not know any more."""

    rank: int
    question: int
    facts: Facts


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag="bye", array_like=True):
    """The rank ends by itself; a connection that ends without one was cut, or the process was killed."""

    rank: int
    step: int
    how: str
    """`end`, or the exception's line."""
    facts: Facts = {}
    time_s: float = 0.0
    """Of the rank's clock, seconds since the epoch; 0: not told."""


class Question(msgspec.Struct, frozen=True, kw_only=True, tag="question", array_like=True):
    """From the collector to one rank; the probe's part that knows `kind` answers."""

    number: int
    kind: str
    facts: Facts


class Schedule(msgspec.Struct, frozen=True, kw_only=True, tag="schedule", array_like=True):
    """From the collector: samples are taken at every `every`-th step from step `start` on, on all ranks."""

    start: int
    every: int


FromRank = Hello | Record | Notice | Beat | Answer | Bye
ToRank = Question | Schedule

_ENCODER = msgspec.msgpack.Encoder()
_FROM_RANK = msgspec.msgpack.Decoder(FromRank)
_TO_RANK = msgspec.msgpack.Decoder(ToRank)


def to_frame(message: FromRank | ToRank) -> bytes:
    """Length and message. Raises FrameError for one that is too long, or holds what cannot be sent."""
    try:
        body = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError("a doctor's message holds what cannot be sent", cause=str(error)) from error
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a doctor's message of {len(body)} bytes is too long", cause=f"limit {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def from_rank(body: bytes) -> FromRank:
    """Raises FrameError."""
    return _decode(_FROM_RANK, body)


def to_rank(body: bytes) -> ToRank:
    """Raises FrameError."""
    return _decode(_TO_RANK, body)


def _decode(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError("a doctor's message cannot be read", cause=str(error)) from error


class Frames:
    """Cuts a stream of bytes into message bodies."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now. Raises FrameError when one claims to be too long."""
        self._held += data
        found: list[bytes] = []
        while len(self._held) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._held)
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a doctor's message claims {size} bytes", cause=f"limit {MAX_FRAME_BYTES}")
            end = _LENGTH.size + size
            if len(self._held) < end:
                break
            found.append(bytes(self._held[_LENGTH.size : end]))
            del self._held[:end]
        return found

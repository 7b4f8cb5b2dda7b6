"""A node's machine as bytes, with its parameters: saved, killed and loaded it goes on as if nothing had happened.

Residuals, pushed but unmerged progress, the very bytes of pushes in flight, and unpushed samples are all in it. For
checkpoints of a node; a worker that was killed without one starts from the ledger's newest base.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ciuic.errors import FrameError
from ciuic.ledger.entry import Phase
from ciuic.ledger.frame import Buffer, build_frame, read_frame
from ciuic.ledger.gradient import GradientReplica
from ciuic.ledger.intervals import Range
from ciuic.ledger.node import NodeMachine, Place
from ciuic.ledger.replica import InFlight, Replica

Float = NDArray[np.float32]


class _Flight(msgspec.Struct, frozen=True, kw_only=True):
    sequence: int
    codec: str
    base_version: int
    tokens: int
    ranges: tuple[Range, ...]
    payload: bytes


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """One fragment, but for its vectors."""

    version: int
    digest: str
    counters: tuple[int, ...]
    codec_up: str
    tokens: int
    ranges: list[Range]
    stepped: bool
    flight: _Flight | None
    phase: Phase
    dropped: list[Range]
    vectors: tuple[str, ...]
    """Names, in the order in which they lie in the payload, each of the fragment's size."""


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    layout_digest: str
    run: str
    node: str
    incarnation: int
    epoch: int
    lr: float
    sequences: list[int]
    fragments: list[_Saved]


def save_machine(machine: NodeMachine, thetas: list[Any]) -> bytes:
    """One checksummed frame. `thetas`: the flat parameters [element_count] of each fragment."""
    saved, parts = [], []
    for replica, theta in zip(machine.replicas, thetas, strict=True):
        vectors = {"theta": replica.vectors.to_host(theta), **_vectors(replica)}
        saved.append(_saved(replica, tuple(vectors)))
        parts += [np.ascontiguousarray(values).view(np.uint8) for values in vectors.values()]
    place = machine.place
    header = _Header(
        layout_digest=machine.layout.digest,
        run=place.run,
        node=place.node,
        incarnation=place.incarnation,
        epoch=place.epoch,
        lr=machine.lr,
        sequences=machine.sequences,
        fragments=saved,
    )
    return build_frame("machine", msgspec.msgpack.encode(header), np.concatenate(parts).data)


def load_machine(machine: NodeMachine, data: Buffer) -> list[Any]:
    """Put a saved state into a fresh machine of the same layout; returns theta of each fragment.

    Raises FrameError for damaged bytes or another layout, before anything has changed.
    """
    frame = read_frame(data, "machine")
    try:
        header = msgspec.msgpack.decode(frame.header, type=_Header)
    except msgspec.DecodeError as error:
        raise FrameError("the saved state of this node is not valid", cause=str(error)) from error
    counts = [machine.layout.fragment_shape(f).element_count for f in range(machine.layout.fragment_count)]
    _check(machine, header, counts, len(frame.payload))
    values = np.frombuffer(bytes(frame.payload), np.float32)
    machine.place = Place(run=header.run, node=header.node, incarnation=header.incarnation, epoch=header.epoch)
    machine.lr, machine.sequences = header.lr, list(header.sequences)
    thetas, place = [], 0
    for replica, part, count in zip(machine.replicas, header.fragments, counts, strict=True):
        vectors = {name: values[place + i * count : place + (i + 1) * count] for i, name in enumerate(part.vectors)}
        place += count * len(part.vectors)
        thetas.append(_restore(replica, part, vectors))
    return thetas


def _check(machine: NodeMachine, header: _Header, counts: list[int], payload_bytes: int) -> None:
    names = [("theta", *_vectors(replica)) for replica in machine.replicas]
    fits = (
        header.layout_digest == machine.layout.digest
        and [part.vectors for part in header.fragments] == names
        and len(header.sequences) == len(counts)
        and payload_bytes == sum(4 * count * len(part) for count, part in zip(counts, names, strict=True))
    )
    if not fits:
        raise FrameError("the saved state is of another model", next="load the state that this run has saved")


def _vectors(replica: Replica | GradientReplica) -> dict[str, Float]:
    host = replica.vectors.to_host
    if isinstance(replica, Replica):
        return {
            "base": host(replica.base),
            "e": host(replica.e),
            "e_before": host(replica.e_before),
            "F": host(replica.F),
        }
    return {
        "base": replica.base,
        "e": replica.e,
        "e_before": replica.e_before,
        "first": replica.moments.first,
        "second": replica.moments.second,
    }


def _saved(replica: Replica | GradientReplica, vectors: tuple[str, ...]) -> _Saved:
    flight = replica.in_flight
    is_plain = isinstance(replica, Replica)
    return _Saved(
        version=replica.version,
        digest=replica.digest,
        counters=replica.counters,
        codec_up=replica.codec_up,
        tokens=replica.progress.tokens,
        ranges=list(replica.progress.ranges),
        stepped=replica.has_stepped if is_plain else False,
        flight=None
        if flight is None
        else _Flight(
            sequence=flight.sequence,
            codec=flight.codec,
            base_version=flight.base_version,
            tokens=flight.tokens,
            ranges=flight.ranges,
            payload=flight.payload.tobytes(),
        ),
        phase="adam" if is_plain else replica.phase,
        dropped=[] if is_plain else list(replica.dropped),
        vectors=vectors,
    )


def _restore(replica: Replica | GradientReplica, part: _Saved, vectors: dict[str, Float]) -> Any:
    if isinstance(replica, Replica):
        replica.load(vectors["base"], part.version, part.counters)
        for name in ("e", "e_before", "F"):
            getattr(replica, name)[:] = replica.vectors.from_host(vectors[name])
        replica.has_stepped = part.stepped
    else:
        replica.load(vectors["base"], part.version, part.counters, moments=vectors, phase=part.phase)
        replica.e, replica.e_before = vectors["e"].copy(), vectors["e_before"].copy()
        replica.dropped = list(part.dropped)
    replica.codec_up = part.codec_up
    replica.progress.add(part.tokens, part.ranges)
    flight = part.flight
    if flight is not None:
        replica.in_flight = InFlight(
            sequence=flight.sequence,
            codec=flight.codec,
            payload=np.frombuffer(flight.payload, np.uint8),
            base_version=flight.base_version,
            tokens=flight.tokens,
            ranges=flight.ranges,
        )
    return replica.vectors.from_host(vectors["theta"])

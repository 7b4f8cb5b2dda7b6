"""Pushes, entries and snapshots of a small layout, for tests of formats and files."""

import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from codec_cases import vector

from ciuic.codec import FragmentCodec, NumpyVectors
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import Push, PushHeader
from ciuic.ledger.layout import Layout, Tensor, make_layout
from ciuic.ledger.outer import OuterOptimizer

RUN = "r1"


def tiny_layout() -> Layout:
    """A row-aligned tensor, a plain one, a small one, a buffer and a counter of 2."""
    return make_layout(
        [
            Tensor(name="embed", shape=(5, 7), dtype="float32", section="coded", row_aligned=True),
            Tensor(name="matrix", shape=(9, 5), dtype="float32", section="coded"),
            Tensor(name="norm", shape=(3,), dtype="float32", section="small"),
            Tensor(name="mean", shape=(2,), dtype="float32", section="buffer", trainable=False),
            Tensor(name="batches", shape=(2,), dtype="int64", section="counter", trainable=False),
        ]
    )


def aggregator(codec: str = "1-bit", *, lr: float = 1.0, momentum: float = 0.0) -> Aggregator:
    """The hub's machine over `tiny_layout`, at version 0."""
    made = Aggregator(tiny_layout(), 0, (codec, codec), OuterOptimizer(lr=lr, momentum=momentum))
    made.initialize(vector("normal", made.element_count, 99), (0, 0))
    return made


def push_header(**changes: Any) -> PushHeader:
    """A header that is accepted at version 0."""
    fields: dict[str, Any] = {
        "run": RUN,
        "node": "n0",
        "incarnation": 1,
        "sequence": 1,
        "fragment": 0,
        "base_version": 0,
        "epoch": 1,
        "tokens": 10,
        "ranges": ((0, 5),),
        "codec": "1-bit",
        "layout_digest": tiny_layout().digest,
        "counters": (1, 2),
    }
    return PushHeader(**fields | changes)


def push_of(values: np.ndarray | None = None, **changes: Any) -> Push:
    """A push of these values (a vector of the layout), or of random ones that depend on its identity."""
    header = push_header(**changes)
    shape = tiny_layout().fragment_shape(0)
    if values is None:
        seed = zlib.crc32(repr((header.node, header.incarnation, header.sequence)).encode())
        values = vector("normal", shape.element_count, seed) * np.float32(0.1)
    return Push(header=header, payload=FragmentCodec(header.codec, shape).encode(values))


@contextmanager
def memory_folder() -> Iterator[Path]:
    """An empty folder, in memory where there is such a place: fsync costs nothing there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def close_round(hub: Aggregator, pushes: list[Push], **facts: Any) -> Any:
    """Aggregate, commit, return the entry."""
    candidate = hub.close(pushes, (), Facts(run=RUN, **facts))
    hub.commit(candidate)
    return candidate.entry


def decoded(push: Push) -> np.ndarray:
    """What a push says, fp32."""
    return NumpyVectors().codec(push.header.codec, tiny_layout().fragment_shape(0)).decode(push.payload)

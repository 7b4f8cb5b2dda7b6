"""The hub's machine of one fragment: accepted pushes in, entries out. Pure: no files, no clock.

    d     = sum of w_i q_i in order of (node, incarnation), w_i = tokens_i / sum of tokens
    mom   = mu mom + d;  u = lr (d + mu mom)                       (torch's SGD with nesterov=True)
    y     = u + e_s;  entry = encode(y);  e_s' = y - decode(entry)
    base' = base - decode(entry)

Everything fp32, one rounding per operation, so that a replay gives the same bits.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ciuic.codec import FragmentCodec
from ciuic.codec.vectors import first_non_finite
from ciuic.errors import LayoutMismatchError, NonFiniteError
from ciuic.ledger.entry import (
    Contributor,
    Entry,
    EntryHeader,
    Part,
    Push,
    Rejection,
    Snapshot,
    SnapshotHeader,
    base_digest,
)
from ciuic.ledger.layout import Layout

Float = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """SGD on pseudo-gradients; lr 1 and momentum 0 is plain averaging."""

    lr: float = 1.0
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the hub adds to an entry besides numbers."""

    run: str
    epoch: int = 0
    samples_committed: int = 0
    time: float = 0.0
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A closed round that is not durable yet: `Aggregator.commit` makes it the state."""

    entry: Entry
    base: Float
    residual: Float
    momentum: Float | None


class Aggregator:
    """State of one fragment on the hub: base, residual e_s, momentum."""

    def __init__(self, layout: Layout, fragment: int, codecs: tuple[str, str], outer: OuterOptimizer) -> None:
        """`codecs` = (up, down)."""
        self.layout, self.fragment, self.outer = layout, fragment, outer
        self.codec_up, self.codec_down = codecs
        shape = layout.fragment_shape(fragment)
        self.element_count = shape.element_count
        self._up, self._down = FragmentCodec(codecs[0], shape), FragmentCodec(codecs[1], shape)
        self.base: Float = np.zeros(self.element_count, np.float32)
        self.residual: Float = np.zeros(self.element_count, np.float32)
        self.momentum: Float | None = np.zeros(self.element_count, np.float32) if outer.momentum else None
        self.version = 0
        self.digest = ""
        self.counters: tuple[int, ...] = ()

    @property
    def push_payload_bytes(self) -> int:
        """Exact payload size of a push."""
        return self._up.payload_bytes

    def initialize(self, base: Float, counters: tuple[int, ...] = ()) -> None:
        """Version 0."""
        self.base[:] = base
        self.counters = counters
        self.digest = base_digest(self.base, counters)

    def check(self, push: Push) -> None:
        """Refuse a push that could harm the ledger. Raises LayoutMismatchError, FrameError or NonFiniteError."""
        header = push.header
        expected = (self.fragment, self.codec_up, self.layout.digest)
        if (header.fragment, header.codec, header.layout_digest) != expected:
            raise LayoutMismatchError(
                f"the push of {header.node} is for another layout or codec",
                cause=f"layout {header.layout_digest[:12]} codec {header.codec} fragment {header.fragment}, "
                f"the run has {self.layout.digest[:12]} {self.codec_up} {self.fragment}",
                next="start this node's worker again with the job of the run",
            )
        self.check_counters(header.counters, f"the push of {header.node}")
        self.check_finite(self._up.decode(push.payload), f"the push of {header.node}")

    def check_counters(self, counters: tuple[int, ...], what: str) -> None:
        """Raises LayoutMismatchError when `what` has another number of integer buffers."""
        expected = sum(t.element_count for t in self.layout.counters()) if self.fragment == 0 else 0
        if len(counters) != expected:
            raise LayoutMismatchError(f"{what} has {len(counters)} counters, the layout has {expected}")

    def check_finite(self, values: Float, what: str) -> None:
        """Raises NonFiniteError that names the first bad parameter of `what`."""
        bad = first_non_finite(values)
        if bad is not None:
            raise NonFiniteError(
                f"{what} holds a non-finite value in {self.layout.name_at(self.fragment, bad)}",
                cause="the node diverged or its memory is damaged",
                next="look at the loss of this node; its progress is not lost, it stays unpushed",
            )

    def close(self, pushes: list[Push], rejected: tuple[Rejection, ...], facts: Facts) -> Candidate:
        """Aggregate checked pushes (at least one) to the next entry. Changes nothing."""
        pushes = sorted(pushes, key=lambda p: p.key)
        total = sum(p.header.tokens for p in pushes)
        mean = np.zeros(self.element_count, np.float32)
        scratch = np.empty(self.element_count, np.float32)
        for push in pushes:
            self._up.decode(push.payload, out=scratch)
            scratch *= np.float32(push.header.tokens / total)
            mean += scratch
        update, momentum = self._outer_step(mean)
        update += self.residual
        payload = self._down.encode(update)
        self._down.decode(payload, out=scratch)
        update -= scratch  # now the new residual
        base = self.base - scratch
        counters = tuple(
            max(column) for column in zip(self.counters, *(p.header.counters for p in pushes), strict=True)
        )
        header = EntryHeader(
            run=facts.run,
            fragment=self.fragment,
            version=self.version + 1,
            codec=self.codec_down,
            epoch=facts.epoch,
            contributors=tuple(self._contributor(p) for p in pushes),
            rejected=rejected,
            outer_lr=self.outer.lr,
            outer_momentum=self.outer.momentum,
            digest=base_digest(base, counters),
            previous_digest=self.digest,
            samples_committed=facts.samples_committed,
            counters=counters,
            time=facts.time,
            why=facts.why,
        )
        return Candidate(entry=Entry(header=header, payload=payload), base=base, residual=update, momentum=momentum)

    def _outer_step(self, mean: Float) -> tuple[Float, Float | None]:
        lr, mu = np.float32(self.outer.lr), np.float32(self.outer.momentum)
        if self.momentum is None:
            if lr != 1:
                mean *= lr
            return mean, None
        momentum = self.momentum * mu
        momentum += mean
        update = momentum * mu
        update += mean
        update *= lr
        return update, momentum

    def _contributor(self, push: Push) -> Contributor:
        header = push.header
        return Contributor(
            node=header.node,
            incarnation=header.incarnation,
            sequence=header.sequence,
            tokens=header.tokens,
            ranges=header.ranges,
            staleness=self.version - header.base_version,
        )

    def commit(self, candidate: Candidate) -> None:
        """The entry is durable: it is the state now."""
        self.base, self.residual, self.momentum = candidate.base, candidate.residual, candidate.momentum
        header = candidate.entry.header
        self.version, self.digest, self.counters = header.version, header.digest, header.counters

    def snapshot(self, run: str) -> Snapshot:
        """The whole state, for the hub's disk. Vectors are not copied: write it before the next commit."""
        vectors: dict[Part, Float] = {"base": self.base, "residual": self.residual}
        if self.momentum is not None:
            vectors["momentum"] = self.momentum
        header = SnapshotHeader(
            run=run,
            fragment=self.fragment,
            version=self.version,
            layout_digest=self.layout.digest,
            digest=self.digest,
            parts=tuple(vectors),
            counters=self.counters,
        )
        return Snapshot(header=header, vectors=vectors)

    def restore(self, snapshot: Snapshot) -> None:
        """Take the state of a snapshot (checked by the caller)."""
        self.base = snapshot.vectors["base"].copy()
        self.residual = snapshot.vectors["residual"].copy()
        if self.momentum is not None:
            self.momentum = snapshot.vectors["momentum"].copy()
        header = snapshot.header
        self.version, self.digest, self.counters = header.version, header.digest, header.counters

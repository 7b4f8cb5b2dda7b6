"""The hub's machine of one fragment: accepted pushes in, entries out. Pure: no files, no clock.

    d     = sum of w_i q_i in order of (node, incarnation); the weights w_i come from the policy
    u     = the outer optimizer's step on d                        (ledger.outer)
    y     = u + e_s;  entry = encode(y);  e_s' = y - decode(entry)
    base' = base - decode(entry)                                   in `gradient` mode: the step of ledger.stepping

Everything fp32, one rounding per operation, so that a replay gives the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ciuic.codec import FragmentCodec
from ciuic.codec.vectors import first_non_finite
from ciuic.errors import LayoutMismatchError, NonFiniteError, ProtocolError
from ciuic.ledger.entry import (
    Contributor,
    Entry,
    EntryHeader,
    Part,
    Phase,
    Push,
    Rejection,
    Snapshot,
    SnapshotHeader,
    StepFacts,
    base_digest,
)
from ciuic.ledger.layout import Layout
from ciuic.ledger.outer import OuterOptimizer, OuterState
from ciuic.ledger.stepping import Stepper, StepState, dither_seed

Float = NDArray[np.float32]
Key = tuple[str, int, int]
NORM_PIECE = 1 << 18
MOMENTUM_CODEC = "1-bit"
"""Of pushes and entries once the second moment is frozen."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the hub adds to an entry besides numbers."""

    run: str
    epoch: int = 0
    samples_committed: int = 0
    time: float = 0.0
    why: str = ""
    stretch: int = 1
    codec: str = ""
    """Of the entry; empty: the aggregator's present one."""
    weights: Mapping[Key, float] | None = None
    """By push; None: its share of the round's tokens."""
    marks: Mapping[Key, tuple[float, float]] | None = None
    """(norm, clip) of each push; the weights hold the clip already."""
    step: StepFacts | None = None
    """In `gradient` mode."""
    payload: NDArray[np.uint8] | None = None
    """Of the entry, when it is known: a replay."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A closed round that is not durable yet: `Aggregator.commit` makes it the state."""

    entry: Entry
    base: Float
    residual: Float
    outer: OuterState
    moments: StepState | None


class Aggregator:
    """State of one fragment on the hub: base, residual e_s, momentum."""

    def __init__(self, layout: Layout, fragment: int, codecs: tuple[str, str], outer: OuterOptimizer) -> None:
        """`codecs` = (up, down) that hold now; `use` changes them."""
        self.layout, self.fragment, self.outer = layout, fragment, outer
        self._layout_digest = layout.digest
        self._counter_count = sum(t.element_count for t in layout.counters()) if fragment == 0 else 0
        self._shape = layout.fragment_shape(fragment)
        self.element_count = self._shape.element_count
        self._codecs: dict[str, FragmentCodec] = {}
        self.codecs_up: set[str] = set()
        """Codecs that pushes may have: those that hold or held in this run."""
        self.codec_down = ""
        self.use(codecs)
        self.base: Float = np.zeros(self.element_count, np.float32)
        self.residual: Float = np.zeros(self.element_count, np.float32)
        self._scratch: Float = np.empty(self.element_count, np.float32)
        self.outer_state = outer.start(self.element_count)
        self._stepper = Stepper(layout, fragment) if layout.step is not None else None
        self.moments = self._stepper.start() if self._stepper else None
        self.phase: Phase = "adam"
        """Of the pushes based on the present version, in `gradient` mode."""
        self.version = 0
        self.digest = ""
        self.counters: tuple[int, ...] = ()

    def use(self, codecs: tuple[str, str]) -> None:
        """From now on these codecs (up, down) hold; pushes of earlier ones are still understood."""
        up, self.codec_down = codecs
        self.codecs_up.add(up)
        if self.layout.step is not None and self.layout.step.freeze_at < 1:
            self.codecs_up.add(MOMENTUM_CODEC)
        self._codec(up), self._codec(self.codec_down)

    def _codec(self, name: str) -> FragmentCodec:
        if name not in self._codecs:
            self._codecs[name] = FragmentCodec(name, self._shape)
        return self._codecs[name]

    def initialize(self, base: Float, counters: tuple[int, ...] = ()) -> None:
        """Version 0."""
        self.base[:] = base
        self.counters = counters
        self.digest = base_digest(self.base, counters)

    def check(self, push: Push) -> None:
        """Refuse a push that could harm the ledger. Raises LayoutMismatchError, FrameError or NonFiniteError."""
        header = push.header
        expected = (self.fragment, self._layout_digest)
        if (header.fragment, header.layout_digest) != expected or header.codec not in self.codecs_up:
            raise LayoutMismatchError(
                f"the push of {header.node} is for another layout or codec",
                cause=f"layout {header.layout_digest[:12]} codec {header.codec} fragment {header.fragment}, "
                f"the run has {self._layout_digest[:12]} {'/'.join(sorted(self.codecs_up))} {self.fragment}",
                next="start this node's worker again with the job of the run",
            )
        self.check_counters(header.counters, f"the push of {header.node}")
        self.check_finite(
            self._codec(header.codec).decode(push.payload, out=self._scratch), f"the push of {header.node}"
        )

    def touched(self) -> float:
        """Share of the elements that the push checked last moves: rows and experts nobody used decode to zeros.

        Looks at every 13th element.
        """
        sample = self._scratch[::13]
        return float(np.count_nonzero(sample)) / max(1, len(sample))

    def norm(self) -> float:
        """L2 norm of the push checked last, added up in double precision."""
        values, total = self._scratch, 0.0
        for start in range(0, len(values), NORM_PIECE):
            piece = values[start : start + NORM_PIECE].astype(np.float64)
            total += float(np.dot(piece, piece))
        return total**0.5

    def norm_of(self, push: Push) -> float:
        """The same of any push that was checked before. Raises FrameError."""
        self._codec(push.header.codec).decode(push.payload, out=self._scratch)
        return self.norm()

    def check_counters(self, counters: tuple[int, ...], what: str) -> None:
        """Raises LayoutMismatchError when `what` has another number of integer buffers."""
        expected = self._counter_count
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
        weights = self._weights(pushes, facts)
        mean = np.zeros(self.element_count, np.float32)
        for push, weight in zip(pushes, weights, strict=True):
            self._codec(push.header.codec).accumulate(push.payload, weight, mean)
        update, outer = self.outer.step(mean, self.outer_state, self.version + 1)
        down = self._codec(facts.codec or self._entry_codec())
        payload, residual = self._pack(update, down, facts)
        base, moments = self._move(payload, down, residual, facts)
        counters = tuple(
            max(column) for column in zip(self.counters, *(p.header.counters for p in pushes), strict=True)
        )
        header = EntryHeader(
            run=facts.run,
            fragment=self.fragment,
            version=self.version + 1,
            codec=down.name,
            epoch=facts.epoch,
            contributors=tuple(self._contributor(p, w, facts) for p, w in zip(pushes, weights, strict=True)),
            rejected=rejected,
            outer_lr=self.outer.lr,
            outer_momentum=self.outer.momentum,
            outer_delay=self.outer.delay,
            step=facts.step,
            digest=base_digest(base, counters),
            previous_digest=self.digest,
            samples_committed=facts.samples_committed,
            counters=counters,
            time=facts.time,
            why=facts.why,
            stretch=facts.stretch,
        )
        return Candidate(
            entry=Entry(header=header, payload=payload), base=base, residual=residual, outer=outer, moments=moments
        )

    def _entry_codec(self) -> str:
        return MOMENTUM_CODEC if self.phase == "frozen" else self.codec_down

    def _dither(self) -> int | None:
        """Without feedback rounding is stochastic, so that nothing is lost on average; the same in every replay."""
        if self._stepper is None or self._stepper.rule.feedback:
            return None
        return dither_seed("hub", self.version + 1, self.fragment)

    def _pack(self, update: Float, codec: FragmentCodec, facts: Facts) -> tuple[NDArray[np.uint8], Float]:
        """(payload, next residual); a replay gives the payload: another machine may round the last bit of a scale.

        `update` is consumed.
        """
        given, dither = facts.payload, self._dither()
        if given is None and dither is None:
            np.negative(update, out=update)
            residual = np.empty_like(update)
            payload, bad = codec.compress(update, self.residual, residual)
            if bad is None:
                return payload, residual
            np.negative(update, out=update)  # giants, but finite: each push was checked
        update += self.residual
        payload = codec.encode(update, dither=dither) if given is None else given
        codec.accumulate(payload, np.float32(-1), update)
        return payload, update

    def _move(
        self, payload: NDArray[np.uint8], codec: FragmentCodec, residual: Float, facts: Facts
    ) -> tuple[Float, StepState | None]:
        """(next base, next moments); without feedback, or when the phase changes, the residual becomes 0."""
        if self._stepper is None or self.moments is None:
            base = self.base.copy()
            codec.accumulate(payload, np.float32(-1), base)
            return base, None
        entry = codec.decode(payload)
        if facts.step is None:
            raise ProtocolError("an entry of gradient mode needs a learning rate")
        if not self._stepper.rule.feedback or facts.step.next_phase != facts.step.phase:
            residual[:] = 0
        base, moments = self._stepper.apply(self.base, entry, self.moments, facts.step, self.version + 1)
        self.check_finite(base, f"the step to version {self.version + 1}")
        return base, moments

    def _weights(self, pushes: list[Push], facts: Facts) -> list[np.float32]:
        total = sum(p.header.tokens for p in pushes)
        given = facts.weights
        return [np.float32(p.header.tokens / total if given is None else given.get(p.key, 0.0)) for p in pushes]

    def _contributor(self, push: Push, weight: np.float32, facts: Facts) -> Contributor:
        header = push.header
        norm, clip = (facts.marks or {}).get(push.key, (0.0, 1.0))
        return Contributor(
            node=header.node,
            incarnation=header.incarnation,
            sequence=header.sequence,
            tokens=header.tokens,
            ranges=header.ranges,
            staleness=self.version - header.base_version,
            weight=float(weight),
            payload_bytes=len(push.payload),
            norm=norm,
            clip=clip,
        )

    def commit(self, candidate: Candidate) -> None:
        """The entry is durable: it is the state now."""
        self.base, self.residual, self.outer_state = candidate.base, candidate.residual, candidate.outer
        self.moments = candidate.moments
        header = candidate.entry.header
        if header.step is not None:
            self.phase = header.step.next_phase
        self.version, self.digest, self.counters = header.version, header.digest, header.counters

    def snapshot(self, run: str) -> Snapshot:
        """The whole state, for the hub's disk. Vectors are not copied: write it before the next commit."""
        vectors: dict[Part, Float] = {"base": self.base, "residual": self.residual}
        if self.outer_state.momentum is not None:
            vectors["momentum"] = self.outer_state.momentum
        if self.outer_state.delayed is not None:
            vectors["delayed"] = self.outer_state.delayed
        if self.moments is not None:
            vectors |= {"first": self.moments.first, "second": self.moments.second}
        header = SnapshotHeader(
            run=run,
            fragment=self.fragment,
            version=self.version,
            layout_digest=self.layout.digest,
            digest=self.digest,
            parts=tuple(vectors),
            counters=self.counters,
            phase=self.phase,
        )
        return Snapshot(header=header, vectors=vectors)

    def restore(self, snapshot: Snapshot) -> None:
        """Take the state of a snapshot (checked by the caller)."""
        self.base = snapshot.vectors["base"].copy()
        self.residual = snapshot.vectors["residual"].copy()
        kept = {part: values.copy() for part, values in snapshot.vectors.items() if part in ("momentum", "delayed")}
        self.outer_state = OuterState(momentum=kept.get("momentum"), delayed=kept.get("delayed"))
        if self.moments is not None:
            first, second = snapshot.vectors["first"].copy(), snapshot.vectors["second"].copy()
            self.moments = StepState(first=first, second=second)
        self.phase = snapshot.header.phase
        header = snapshot.header
        self.version, self.digest, self.counters = header.version, header.digest, header.counters

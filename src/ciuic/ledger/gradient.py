"""The node's machine of one fragment in `gradient` mode: every step's gradient goes out, every mean comes back. Pure.

    base, m, v  bit-identical everywhere at a version; theta is always the base
    e           residual, where the rule has feedback; a push that was not merged leaves it as if it had not been tried

The same outward face as ledger.replica.Replica, but what is pushed is the gradient (or, once the second moment is
frozen, this node's momentum) of the samples since the last push, taken at the base.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ciuic.codec import FragmentCodec, Vectors
from ciuic.codec.vectors import first_non_finite
from ciuic.errors import ConflictError, NonFiniteError, ProtocolError
from ciuic.ledger.aggregate import MOMENTUM_CODEC
from ciuic.ledger.entry import Entry, Phase, base_digest
from ciuic.ledger.intervals import Range
from ciuic.ledger.layout import Layout
from ciuic.ledger.replica import InFlight, Progress, check_next, check_result
from ciuic.ledger.stepping import Stepper, StepState, dither_seed

Float = NDArray[np.float32]


class GradientReplica:
    """State of one fragment on a node, on the host."""

    def __init__(self, layout: Layout, fragment: int, vectors: Vectors, codec_up: str) -> None:
        """`codec_up`: of this node's next pushes; it may be changed. `vectors` gives theta back."""
        self.layout, self.fragment, self.vectors = layout, fragment, vectors
        self.codec_up = codec_up
        self._shape = layout.fragment_shape(fragment)
        self._codecs: dict[str, FragmentCodec] = {}
        self._stepper = Stepper(layout, fragment)
        self.moments: StepState = self._stepper.start()
        self.phase: Phase = "adam"
        self.base: Float = np.zeros(self._shape.element_count, np.float32)
        self.e: Float = np.zeros_like(self.base)
        self.version = 0
        self.digest = ""
        self.residual = 0.0
        """Not measured here: what 1-bit leaves out of a gradient is in the next step's."""
        self.counters: tuple[int, ...] = ()
        self.in_flight: InFlight | None = None
        self.e_before: Float = self.e
        """While a push is in flight: the residual before it."""
        self.progress = Progress()
        self.dropped: list[Range] = []
        """Samples of rejected pushes: their gradient is old, so they are to be trained again."""

    def _codec(self, name: str) -> FragmentCodec:
        if name not in self._codecs:
            self._codecs[name] = FragmentCodec(name, self._shape)
        return self._codecs[name]

    @property
    def push_codec(self) -> str:
        """Of the next push."""
        return MOMENTUM_CODEC if self.phase == "frozen" else self.codec_up

    def load(
        self,
        base: Float,
        version: int,
        counters: tuple[int, ...] = (),
        *,
        moments: Mapping[Any, Float] | None = None,
        phase: Phase = "adam",
    ) -> Any:
        """Start from a snapshot; returns theta. `moments`: its parts `first` and `second`; None before any step."""
        self.base = base.copy()
        self.e = self.e_before = np.zeros_like(self.base)
        self.moments = self._stepper.start()
        if moments is not None:
            self.moments = StepState(first=moments["first"].copy(), second=moments["second"].copy())
        self.version, self.counters, self.phase = version, counters, phase
        self.digest = base_digest(base, counters)
        self.in_flight, self.progress = None, Progress()
        return self.vectors.from_host(self.base)

    @property
    def base_vector(self) -> Any:
        """The base as a vector of theta's back end."""
        return self.vectors.from_host(self.base)

    def stepped(self, tokens: int, ranges: tuple[Range, ...] | list[Range] = ()) -> None:
        """The next push's gradient is over these tokens and samples."""
        self.progress.add(tokens, ranges)

    def push(self, gradient: Float, sequence: int, who: str = "") -> InFlight:
        """Encode the mean gradient [element_count] of the progress; buffers hold base - theta.

        Raises NonFiniteError (nothing has changed) and ConflictError when a push is in flight or there is no progress.
        """
        if self.in_flight is not None or self.progress.tokens <= 0:
            raise ConflictError("there is nothing to push now", cause="a push is in flight, or no token was trained")
        frozen = self.phase == "frozen"
        sent = self._stepper.momentum(gradient, self.moments) if frozen else gradient
        feedback = self._stepper.rule.feedback
        wanted = sent + self.e if feedback else sent
        bad = first_non_finite(wanted)
        if bad is not None:
            raise NonFiniteError(
                f"the gradient of {self.layout.name_at(self.fragment, bad)} is not finite",
                cause="the loss diverged or overflowed on this node",
                next="lower the learning rate or use bf16 instead of fp16; this node trains other samples next",
            )
        codec = self._codec(self.push_codec)
        self.e_before = self.e
        if feedback:
            payload = codec.encode(wanted)
            self.e = wanted - codec.decode(payload)
        else:
            payload = codec.encode(wanted, dither=dither_seed(who, sequence, self.fragment))
        self.in_flight = self.progress.take_off(sequence, codec=codec.name, payload=payload, version=self.version)
        self.progress = Progress()
        return self.in_flight

    def discard(self, theta: Any) -> list[Range]:
        """Give up the progress since the last push; theta is the base again. Returns its samples."""
        lost, self.progress = self.progress, Progress()
        theta[:] = self.vectors.from_host(self.base)
        return lost.ranges

    def merge(self, entry: Entry, theta: Any, *, outcome: Literal["merged", "rejected", "absent"]) -> None:
        """Apply the next entry: base and moments make the run's step, theta is the base. Raises as Replica.merge."""
        header = entry.header
        check_next(self, entry)
        if header.step is None:
            raise ProtocolError(f"entry {header.version} has no step, this run is in gradient mode")
        mean = self._codec(header.codec).decode(entry.payload)
        self.base, self.moments = self._stepper.apply(self.base, mean, self.moments, header.step, header.version)
        if self.in_flight is not None and outcome != "absent":
            self._settle(merged=outcome == "merged")
        if header.step.next_phase != header.step.phase:
            self.e = self.e_before = np.zeros_like(self.e)  # it was in other units
        self.phase = header.step.next_phase
        theta[:] = self.vectors.from_host(self.base)
        digest = base_digest(self.base, header.counters)
        self.version, self.counters, self.digest = header.version, header.counters, digest  # together: others look
        check_result(self, entry)

    def reject(self) -> None:
        """The push in flight was refused: its samples are to be trained again."""
        if self.in_flight is not None:
            self._settle(merged=False)

    def _settle(self, *, merged: bool) -> None:
        if self.in_flight is not None and not merged:
            self.dropped += self.in_flight.ranges
            self.e = self.e_before
        self.in_flight = None

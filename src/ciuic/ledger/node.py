"""The node's machine over all fragments: numbers its pushes, fills their headers, and reads the hub's answers.

Pure: the caller moves frames and holds theta (one flat vector per fragment).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ciuic.codec import Vectors
from ciuic.ledger.entry import Entry, Phase, Push, PushHeader, Snapshot
from ciuic.ledger.gradient import GradientReplica
from ciuic.ledger.intervals import Range
from ciuic.ledger.layout import Layout
from ciuic.ledger.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who pushes: changes only with a new attachment."""

    run: str
    node: str
    incarnation: int
    epoch: int = 0


class NodeMachine:
    """All fragments of one worker."""

    def __init__(self, layout: Layout, vectors: Vectors, codec_up: str, place: Place) -> None:
        """`codec_up`: of the next pushes; see `use`."""
        self.layout, self.place = layout, place
        self._layout_digest = layout.digest
        kind = Replica if layout.step is None else GradientReplica
        self.replicas: list[Replica | GradientReplica] = [
            kind(layout, f, vectors, codec_up) for f in range(layout.fragment_count)
        ]
        self.lr = 0.0
        """The learning rate now; `gradient` mode sends it."""
        self.sequences = [0] * layout.fragment_count
        """Of the newest push of each fragment."""

    def use(self, codec_up: str) -> None:
        """Later pushes have this codec. Residuals go on: they are in units of the parameters."""
        for replica in self.replicas:
            replica.codec_up = codec_up

    def load(self, fragment: int, base: NDArray[np.float32], version: int, counters: tuple[int, ...] = ()) -> Any:
        """Start a fragment from a base that no step has moved (or has no moments); returns its theta."""
        return self.replicas[fragment].load(base, version, counters)

    def load_snapshot(self, fragment: int, snapshot: Snapshot) -> Any:
        """Start a fragment from a snapshot, in `gradient` mode with its moments; returns its theta."""
        replica, header = self.replicas[fragment], snapshot.header
        base = snapshot.vectors["base"]
        if isinstance(replica, Replica) or "first" not in header.parts:
            return replica.load(base, header.version, header.counters)
        return replica.load(base, header.version, header.counters, moments=snapshot.vectors, phase=header.phase)

    def stepped(self, tokens: int, ranges: list[Range]) -> None:
        """One or more inner steps over these tokens and samples. Samples are reported with fragment 0."""
        for replica in self.replicas:
            replica.stepped(tokens, ranges if replica.fragment == 0 else ())

    def accessed(self, fragment: int, count: int) -> None:
        """Of what was trained since this was last said, so many tokens reached its experts; -1: not known."""
        self.replicas[fragment].progress.accessed(count)

    def unpushed_tokens(self, fragment: int = 0) -> int:
        """Tokens trained since the last push."""
        return self.replicas[fragment].progress.tokens

    def can_push(self, fragment: int, target_tokens: int) -> bool:
        """No push in flight and at least `target_tokens` trained since the last one."""
        replica = self.replicas[fragment]
        return replica.in_flight is None and replica.progress.tokens >= max(1, target_tokens)

    def push(self, fragment: int, theta: Any, counters: tuple[int, ...] = ()) -> Push:
        """Encode the progress; in `gradient` mode `theta` is the gradient. Raises NonFiniteError: see the replicas."""
        replica, sequence = self.replicas[fragment], self.sequences[fragment] + 1
        phase: Phase = "adam"
        if isinstance(replica, GradientReplica):
            phase = replica.phase
            flight = replica.push(theta, sequence, f"{self.place.node}/{self.place.incarnation}")
        else:
            flight = replica.push(theta, sequence)
        self.sequences[fragment] = flight.sequence
        header = PushHeader(
            run=self.place.run,
            node=self.place.node,
            incarnation=self.place.incarnation,
            sequence=flight.sequence,
            fragment=fragment,
            base_version=flight.base_version,
            epoch=self.place.epoch,
            tokens=flight.tokens,
            ranges=flight.ranges,
            codec=flight.codec,
            layout_digest=self._layout_digest,
            counters=counters if fragment == 0 else (),
            lr=self.lr,
            phase=phase,
            accesses=flight.accesses,
        )
        return Push(header=header, payload=flight.payload)

    def discard(self, fragment: int, theta: Any) -> list[Range]:
        """Give up what was trained since the last push; see Replica.discard."""
        return self.replicas[fragment].discard(theta)

    def rejected(self, fragment: int, sequence: int) -> None:
        """The hub refused this push (it was never accepted): its progress is unpushed again."""
        flight = self.replicas[fragment].in_flight
        if flight is not None and flight.sequence == sequence:
            self.replicas[fragment].reject()

    def merge(self, entry: Entry, theta: Any) -> None:
        """Apply the next entry of its fragment; see Replica.merge."""
        replica = self.replicas[entry.header.fragment]
        flight = replica.in_flight
        sequence = flight.sequence if flight else 0
        replica.merge(entry, theta, outcome=entry.outcome(self.place.node, self.place.incarnation, sequence))

"""What simulated nodes train: a tiny vector whose pushes, entries and digests are real.

Most nodes are `Extra`s: they send ready-made payloads and share one base, which a single real replica moves entry by
entry (so each entry's digest is checked). A few are `Witness`es: the whole machine of a node, with its own base,
residual and progress.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ciuic.codec import FragmentCodec, NumpyVectors
from ciuic.errors import ProtocolError
from ciuic.ledger.entry import Entry, Push, PushHeader, Snapshot, SnapshotHeader, base_digest, entry_from_frame
from ciuic.ledger.intervals import Range
from ciuic.ledger.layout import Layout, Tensor, make_layout
from ciuic.ledger.node import NodeMachine, Place
from ciuic.ledger.replica import Progress

PAYLOADS = 16
"""Ready-made ones per codec."""
MOVE = np.float32(0.01)
Float = NDArray[np.float32]
Outcome = Literal["merged", "rejected", "absent"]


def tiny_layout() -> Layout:
    """A matrix by rows and a vector: 72 elements, every kind of section a push has."""
    return make_layout(
        [
            Tensor(name="matrix", shape=(8, 8), dtype="float32", section="coded", row_aligned=True),
            Tensor(name="norm", shape=(8,), dtype="float32", section="small"),
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Known:
    """One entry as every node sees it."""

    frame: bytes
    entry: Entry
    outcomes: dict[str, tuple[int, int, Outcome]]
    """Node -> (incarnation, sequence, outcome)."""


class Common:
    """What all nodes of a simulation share: the layout, payloads, and each entry decoded once."""

    def __init__(self, run_id: str, seed: int) -> None:
        self.run_id, self.layout = run_id, tiny_layout()
        self.digest_of_layout = self.layout.digest
        self.random = np.random.default_rng(seed)
        self.base_0 = self.random.normal(size=self.element_count).astype(np.float32)
        self.entries: list[Known] = []
        """Of versions 1, 2, ..."""
        self.digests = [base_digest(self.base_0)]
        """Of the base at versions 0, 1, ... as the one real replica has it."""
        self._machine = NodeMachine(self.layout, NumpyVectors(), "none", Place(run=run_id, node="", incarnation=0))
        self._theta: Float = self._machine.load(0, self.base_0, 0)
        self._payloads: dict[str, list[NDArray[np.uint8]]] = {}

    @property
    def element_count(self) -> int:
        return self.layout.fragment_shape(0).element_count

    def payload(self, codec: str, number: int) -> NDArray[np.uint8]:
        """One of the ready-made payloads."""
        if codec not in self._payloads:
            made = FragmentCodec(codec, self.layout.fragment_shape(0))
            self._payloads[codec] = [
                made.encode(self.random.normal(size=self.element_count).astype(np.float32) * MOVE)
                for _ in range(PAYLOADS)
            ]
        return self._payloads[codec][number % PAYLOADS]

    def version_0(self) -> bytes:
        """Frame of the first snapshot."""
        header = SnapshotHeader(
            run=self.run_id,
            fragment=0,
            version=0,
            layout_digest=self.digest_of_layout,
            digest=self.digests[0],
            parts=("base",),
        )
        return Snapshot(header=header, vectors={"base": self.base_0}).to_frame()

    def take(self, after: int, frames: Sequence[bytes]) -> None:
        """Entries that the hub sent. Raises ProtocolError when one of them is not what it was before."""
        for version, frame in enumerate(frames, start=after + 1):
            if version <= len(self.entries):
                if self.entries[version - 1].frame != frame:
                    raise ProtocolError(f"version {version} is not what it was")
                continue
            entry = entry_from_frame(frame)
            self._machine.merge(entry, self._theta)
            self.digests.append(self._machine.replicas[0].digest)
            outcomes: dict[str, tuple[int, int, Outcome]] = {
                c.node: (c.incarnation, c.sequence, "merged") for c in entry.header.contributors
            }
            outcomes |= {r.node: (r.incarnation, r.sequence, "rejected") for r in entry.header.rejected}
            self.entries.append(Known(frame=frame, entry=entry, outcomes=outcomes))


class Extra:
    """A node's side of the ledger without numbers of its own."""

    def __init__(self, common: Common, node: str, incarnation: int, version: int) -> None:
        self.common, self.node, self.incarnation = common, node, incarnation
        self.version = version
        self.codec = "none"
        self.sequence = 0
        self._progress = Progress()
        self._flight: tuple[int, int, tuple[Range, ...]] | None = None
        """(sequence, tokens, ranges)"""

    @property
    def has_flight(self) -> bool:
        """A push has not come back in an entry."""
        return self._flight is not None

    @property
    def tokens(self) -> int:
        """Trained since the last push."""
        return self._progress.tokens

    @property
    def digest(self) -> str:
        """Of the base."""
        return self.common.digests[self.version]

    def stepped(self, tokens: int, ranges: list[Range]) -> None:
        """Trained these."""
        self._progress.add(tokens, ranges)

    def push(self) -> bytes:
        """The frame of all progress."""
        self.sequence += 1
        progress, self._progress = self._progress, Progress()
        ranges = tuple(progress.ranges)
        self._flight = (self.sequence, progress.tokens, ranges)
        header = PushHeader(
            run=self.common.run_id,
            node=self.node,
            incarnation=self.incarnation,
            sequence=self.sequence,
            fragment=0,
            base_version=self.version,
            epoch=0,
            tokens=progress.tokens,
            ranges=ranges,
            codec=self.codec,
            layout_digest=self.common.digest_of_layout,
        )
        payload = self.common.payload(self.codec, 31 * self.incarnation + self.sequence)
        return Push(header=header, payload=payload).to_frame()

    def rejected(self, sequence: int) -> None:
        """The hub refused the push: its progress is unpushed again."""
        if self._flight is None or self._flight[0] != sequence:
            return
        _, tokens, ranges = self._flight
        again = Progress()
        again.add(tokens, ranges)
        again.add(self._progress.tokens, self._progress.ranges)
        self._progress, self._flight = again, None

    def merge_up_to(self, version: int) -> None:
        """Apply the entries up to this version."""
        while self.version < version:
            known = self.common.entries[self.version]
            incarnation, sequence, outcome = known.outcomes.get(self.node, (0, 0, "absent"))
            if self._flight is not None and (incarnation, sequence) == (self.incarnation, self._flight[0]):
                if outcome == "merged":
                    self._flight = None
                else:
                    self.rejected(sequence)
            self.version += 1


class Witness:
    """The whole machine of a node: it really trains, compresses with error feedback, and checks every digest."""

    def __init__(self, common: Common, node: str, incarnation: int, version: int, base: Float) -> None:
        self.common = common
        self._machine = NodeMachine(
            common.layout, NumpyVectors(), "none", Place(run=common.run_id, node=node, incarnation=incarnation)
        )
        self._theta: Float = self._machine.load(0, base, version)

    @property
    def codec(self) -> str:
        """Of the next pushes."""
        return self._machine.replicas[0].codec_up

    @codec.setter
    def codec(self, name: str) -> None:
        self._machine.use(name)

    @property
    def version(self) -> int:
        """Of the base."""
        return self._machine.replicas[0].version

    @property
    def sequence(self) -> int:
        """Of the newest push."""
        return self._machine.sequences[0]

    @property
    def has_flight(self) -> bool:
        """A push has not come back in an entry."""
        return self._machine.replicas[0].in_flight is not None

    @property
    def tokens(self) -> int:
        """Trained since the last push."""
        return self._machine.unpushed_tokens()

    @property
    def digest(self) -> str:
        """Of the base."""
        return self._machine.replicas[0].digest

    def stepped(self, tokens: int, ranges: list[Range]) -> None:
        """Trained these."""
        self._theta += self.common.random.normal(size=len(self._theta)).astype(np.float32) * MOVE
        self._machine.stepped(tokens, ranges)

    def push(self) -> bytes:
        """The frame of all progress."""
        return self._machine.push(0, self._theta).to_frame()

    def rejected(self, sequence: int) -> None:
        """The hub refused the push: its progress is unpushed again."""
        self._machine.rejected(0, sequence)

    def merge_up_to(self, version: int) -> None:
        """Apply the entries up to this version. Raises DigestMismatchError when a base is not the hub's."""
        while self.version < version:
            self._machine.merge(self.common.entries[self.version].entry, self._theta)

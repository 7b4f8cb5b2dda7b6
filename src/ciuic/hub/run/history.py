"""What a run's ledger remembers for people: closed rounds, held-out losses, bytes."""

from bisect import insort
from collections import deque
from typing import TYPE_CHECKING, Any

from ciuic.hub.shards.placement import Traffic
from ciuic.ledger.copy import Committed
from ciuic.ledger.entry import EntryHeader
from ciuic.ledger.journal import Evaluated
from ciuic.ledger.samples import SampleLedger
from ciuic.net.messages import EvaluationPoint, RoundInfo, SampleCounts

if TYPE_CHECKING:
    from ciuic.hub.run.rounds import RunLedger

KEEP_ROUNDS = 200
KEEP_EVALUATIONS = 2000


class History:
    """Bounded, rebuilt from the entry log and the journal after a restart."""

    def __init__(self) -> None:
        self.rounds: deque[RoundInfo] = deque(maxlen=KEEP_ROUNDS)
        self.evaluations: list[EvaluationPoint] = []
        """In order of versions, whatever the order in which nodes told them."""
        self.push_bytes = 0
        self.entry_bytes = 0
        self.traffic = Traffic()
        self.digests: dict[tuple[int, int], str] = {}
        """Of the latest bases, by fragment and version."""
        self._last_time: dict[int, float] = {}

    def closed(self, header: EntryHeader, entry_bytes: int) -> RoundInfo:
        """A round ended in this entry."""
        before = self._last_time.get(header.fragment)
        self._last_time[header.fragment] = header.time
        self.digests[header.fragment, header.version] = header.digest
        self.digests.pop((header.fragment, header.version - KEEP_ROUNDS), None)
        push_bytes = sum(c.payload_bytes for c in header.contributors)
        self.entry_bytes += entry_bytes
        self.push_bytes += push_bytes
        pushes = len(header.contributors)
        self.traffic.observe(header.fragment, header.time, pushes, push_bytes, entry_bytes)
        info = RoundInfo(
            version=header.version,
            fragment=header.fragment,
            time=header.time,
            nodes=[c.node for c in header.contributors],
            staleness=[c.staleness for c in header.contributors],
            tokens=sum(c.tokens for c in header.contributors),
            push_bytes=push_bytes,
            entry_bytes=entry_bytes,
            duration_s=0.0 if before is None else header.time - before,
            why=header.why,
        )
        self.rounds.append(info)
        return info

    def evaluated(self, record: Evaluated) -> None:
        """A node told the held-out loss of a version."""
        insort(self.evaluations, evaluation_point(record), key=lambda point: point.version)
        del self.evaluations[:-KEEP_EVALUATIONS]

    def full(self) -> dict[str, Any]:
        """All that is remembered, as fields of RunInfo."""
        return {"rounds": list(self.rounds), "evaluations": list(self.evaluations)}

    def loss_consistent(self, digests: list[list[str]]) -> bool | None:
        """Whether all nodes that finished have the same final loss and digests; None before two of them said so."""
        finals = {e.node_id: e for e in self.evaluations if e.final}
        if len(finals) < 2:
            return None
        same_loss = len({e.loss for e in finals.values()}) == 1
        return same_loss and len({tuple(d) for d in digests if d}) <= 1


def sample_counts(samples: SampleLedger) -> SampleCounts:
    """The sample ledger in numbers."""
    return SampleCounts(
        total=samples.total,
        leased=len(samples.ever_leased),
        committed=len(samples.committed),
        duplicated=samples.duplicated,
        lost=samples.total - len(samples.committed) - len(samples.free) - samples.held if samples.total else 0,
    )


def committed_samples(ledger: "RunLedger") -> Committed:
    """Which samples are committed at the present version of fragment 0, and the newest incarnations."""
    return Committed(
        version=ledger.fragments[0].version if ledger.fragments else 0,
        total=ledger.samples.total,
        ranges=list(ledger.samples.committed),
        duplicated=ledger.samples.duplicated,
        incarnations={name: member.incarnation for name, member in ledger.members.items()},
    )


def evaluation_point(record: Evaluated) -> EvaluationPoint:
    """The journal's record as a message."""
    return EvaluationPoint(
        version=record.version,
        loss=record.loss,
        node_id=record.node,
        time=record.time,
        samples_committed=record.samples_committed,
        final=record.final,
    )

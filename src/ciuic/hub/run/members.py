"""The members of one run as its ledger sees them: incarnations, what they last reported, and whom a round waits for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ciuic.hub.run.observing import Digests, Observed
from ciuic.ledger.intervals import IntervalSet
from ciuic.ledger.samples import SampleLedger
from ciuic.net.messages import DetachRequest, LeaseReply, NodeInRun, ReportRequest

MemberState = Literal["warming", "training", "idle", "done", "gone"]
PRESENT: frozenset[MemberState] = frozenset({"warming", "training", "idle"})
"""A worker in one of these is in the run."""
_SUMMED = ("step", "samples", "tokens", "wall_s", "compute_s", "communication_s", "communication_cpu_s", "data_s")


@dataclass(kw_only=True)
class Member:
    """One node in a run, over all its incarnations."""

    node: str
    incarnation: int = 0
    state: MemberState = "gone"
    has_left: bool = False
    """The present incarnation said goodbye: what it had still on its way must not bring it back."""
    totals: dict[str, float] = field(default_factory=dict)
    """Sums of the reports of earlier incarnations."""
    report: ReportRequest | None = None
    last_request_id: int = 0
    last_lease: LeaseReply | None = None
    unpushed: bool = False
    """It has, or may have, progress in some fragment that has not merged."""
    behind: list[int] = field(default_factory=list)
    """Fragments in which it has, or may have, progress that it has not pushed."""
    heard_s: float = 0.0
    """On the hub's monotonic clock: when its worker last said anything."""
    ready: int = -1
    """Samples it had leased and not started when it last asked; -1: it did not say."""
    step: int = 1
    """Samples of one of its steps."""
    told_s: float = 0.0
    """When it said `ready`."""
    is_silent: bool = False
    """Its worker has said nothing for the job's grace, whether or not its node lives."""
    lost: IntervalSet = field(default_factory=IntervalSet)
    """Leases that went back although its present worker may still hold them."""
    pushes_accepted: int = 0
    pushes_merged: int = 0
    pushes_rejected: int = 0
    staleness: int = 0
    longest_stall_s: float = 0.0
    final_digests: list[str] = field(default_factory=list)
    observed: Observed = field(default_factory=Observed)

    @property
    def is_present(self) -> bool:
        return self.state in PRESENT

    def attach(self, incarnation: int) -> None:
        """A new incarnation takes over; what the older ones did stays in the totals."""
        self.totals = self.summed()
        self.report, self.last_request_id, self.last_lease = None, 0, None
        self.incarnation, self.state = incarnation, "warming"
        self.has_left = self.unpushed = False
        self.behind = []
        self.ready, self.lost = -1, IntervalSet()
        self.observed.begins()

    def leaves(self, request: DetachRequest) -> None:
        """Its worker says goodbye."""
        self.has_left = True
        self.observed.left(request)

    def take_report(self, report: ReportRequest, versions: Sequence[int], digests: Digests) -> None:
        """`versions` and `digests`: of the hub's bases."""
        self.report = report
        self.observed.heard(report, versions, digests)
        self.longest_stall_s = max(self.longest_stall_s, report.longest_stall_s)
        if report.final_digests:
            self.final_digests = list(report.final_digests)

    def summed(self) -> dict[str, float]:
        """Totals over all incarnations."""
        now = {name: float(getattr(self.report, name)) if self.report else 0.0 for name in _SUMMED}
        return {name: self.totals.get(name, 0.0) + now[name] for name in _SUMMED}

    def info(self, samples: SampleLedger, interval: int = 0) -> NodeInRun:
        """For status and the live page."""
        sums = self.summed()
        report = self.report
        is_idle = not samples.free and not samples.outstanding(self.node)
        return NodeInRun(
            node_id=self.node,
            state="idle" if is_idle and self.is_present else self.state,
            incarnation=self.incarnation,
            step=int(sums["step"]),
            samples=int(sums["samples"]),
            tokens=int(sums["tokens"]),
            loss=report.loss if report else None,
            base_version=min(report.base_versions, default=0) if report else 0,
            pushes_accepted=self.pushes_accepted,
            pushes_merged=self.pushes_merged,
            pushes_rejected=self.pushes_rejected,
            wall_s=sums["wall_s"],
            compute_s=sums["compute_s"],
            communication_s=sums["communication_s"],
            communication_cpu_s=sums["communication_cpu_s"],
            data_s=sums["data_s"],
            longest_stall_s=self.longest_stall_s,
            step_s=report.step_s if report else 0.0,
            interval=interval,
            staleness=self.staleness,
            final_digests=self.final_digests,
        )

"""What the doctor's rules want to know of each node in a run: the latest of what its worker reported."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ciuic.doctor.catalogue import code_of
from ciuic.doctor.incidents import severity_of
from ciuic.doctor.rules.ledger import WINDOW, LedgerView, NodeView, judge
from ciuic.hub.run.history import sample_counts
from ciuic.net.messages import DetachRequest, ReportRequest, RunFinding

if TYPE_CHECKING:
    from ciuic.hub.run.rounds import RunLedger

Digests = Mapping[tuple[int, int], str]
"""Of the hub's bases, by fragment and version, as far back as it remembers."""
BAD_BASE = "DigestMismatchError"


@dataclass(kw_only=True)
class Observed:
    """One node. Only what its present worker says counts, but for `bad_bases`."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    residuals: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lags: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    mismatches: int = 0
    base: tuple[int, str, str] = (0, "", "")
    bad_bases: int = 0
    _step: int = -1
    _pushes: int = -1

    def begins(self) -> None:
        """A new worker."""
        self.losses.clear()
        self.residuals.clear()
        self.lags.clear()
        self.mismatches, self._step, self._pushes = 0, -1, -1

    def heard(self, report: ReportRequest, versions: Sequence[int], digests: Digests) -> None:
        """A report; `versions`: the hub's, by fragment."""
        if report.loss is not None and math.isfinite(report.loss) and report.step != self._step:
            self.losses.append(report.loss)
        if report.residuals and report.pushes != self._pushes:
            self.residuals.append(max(report.residuals))
        self._step, self._pushes = report.step, report.pushes
        if report.base_versions and len(report.base_versions) == len(versions):
            self.lags.append(max(hub - here for hub, here in zip(versions, report.base_versions, strict=True)))
        self._compare(report, digests)

    def _compare(self, report: ReportRequest, digests: Digests) -> None:
        known = 0
        for fragment, (version, digest) in enumerate(zip(report.base_versions, report.base_digests, strict=False)):
            there = digests.get((fragment, version))
            if there is None:
                continue
            known += 1
            if there != digest:
                self.mismatches += 1
                self.base = version, digest, there
                return
        if known:
            self.mismatches = 0

    def left(self, request: DetachRequest) -> None:
        """The worker says goodbye."""
        if request.reason == "failed" and request.detail.startswith(BAD_BASE):
            self.bad_bases += 1

    def view(self, node: str, *, is_training: bool) -> NodeView:
        """For the rules."""
        return NodeView(
            node=node,
            is_training=is_training,
            losses=tuple(self.losses),
            residuals=tuple(self.residuals),
            lags=tuple(self.lags),
            mismatches=self.mismatches,
            base=self.base,
            bad_bases=self.bad_bases,
        )


def findings_of(ledger: "RunLedger") -> list[RunFinding]:
    """What the rules find in a run now, the worst first."""
    counts = sample_counts(ledger.samples)
    view = LedgerView(
        version=max((fragment.version for fragment in ledger.fragments), default=0),
        nodes=[
            member.observed.view(member.node, is_training=member.state == "training")
            for _, member in sorted(ledger.members.items())
        ],
        duplicated=counts.duplicated,
        lost=counts.lost,
    )
    found = sorted(judge(view), key=lambda finding: (severity_of(finding) != "critical", finding.code))
    return [_told(finding) for finding in found]


def _told(finding: Any) -> RunFinding:
    code = code_of(finding.code)
    return RunFinding(
        code=finding.code,
        severity=severity_of(finding).value,
        nodes=list(finding.modules),
        version=finding.step,
        cause=finding.cause,
        fix=finding.fix or code.fix,
    )

"""One cause per incident: what follows from another finding is folded under it."""

from collections.abc import Iterable

import msgspec

from ciuic.doctor.catalogue import code_of
from ciuic.doctor.finding import Finding, Incident, Severity

_WEIGHT = {Severity.CRITICAL: 2, Severity.WARNING: 1, Severity.NOTE: 0}
SLACK_STEPS = 2
"""A consequence may be seen this many steps before its cause: they are found by different samples."""


def severity_of(finding: Finding) -> Severity:
    """Its own, else the catalogue's."""
    return finding.severity or code_of(finding.code).severity


def fold(findings: Iterable[Finding]) -> list[Incident]:
    """Incidents, the most likely first. Each finding is in one of them, once."""
    ordered = sorted(findings, key=_order)
    causes: list[Finding] = []
    under: dict[int, list[Finding]] = {}
    for finding in ordered:
        index = next((at for at, cause in enumerate(causes) if _explains(cause, finding)), None)
        if index is None:
            causes.append(finding)
        else:
            under.setdefault(index, []).append(finding)
    return [
        Incident(cause=_filled(cause), collateral=tuple(_filled(other) for other in under.get(at, ())))
        for at, cause in enumerate(causes)
    ]


def _filled(finding: Finding) -> Finding:
    """With the catalogue's severity and fix where it has none of its own: who reads it has no catalogue."""
    fix = finding.fix or code_of(finding.code).fix
    return msgspec.structs.replace(finding, severity=severity_of(finding), fix=fix)


def _order(finding: Finding) -> tuple[object, ...]:
    # A finding that explains others comes before them: depth is 0 for a root cause.
    return (
        -_WEIGHT[severity_of(finding)],
        code_of(finding.code).depth,
        -finding.confidence,
        finding.step,
        repr(finding),
    )


def _explains(cause: Finding, other: Finding) -> bool:
    if cause.code == other.code:
        return True
    return other.code in code_of(cause.code).explains and cause.step <= other.step + SLACK_STEPS

"""Findings as lines for a person: the cause first, then who, since when, how it is known, what to change."""

import textwrap
from collections.abc import Iterable, Iterator

from ciuic.doctor.catalogue import code_of
from ciuic.doctor.finding import Blind, Finding, Incident
from ciuic.doctor.incidents import severity_of

WIDTH = 116
MODULES_SHOWN = 6
EVIDENCE_SHOWN = 10
WHOLE_MAX = 1e7
"""Whole numbers below it are written out."""


def report_lines(incidents: Iterable[Incident], blind: Iterable[Blind]) -> Iterator[str]:
    """The whole report."""
    found = list(incidents)
    unseen = list(blind)
    if not found:
        yield "nothing found in what could be looked at" if unseen else "nothing found"
    for number, incident in enumerate(found):
        if number:
            yield ""
        yield from incident_lines(incident)
    if unseen:
        yield ""
        yield "could not look (this is not the same as healthy):"
        for each in unseen:
            who = f" on {ranks_text(each.ranks)}" if each.ranks else ""
            yield from _wrapped("  - ", f"{each.what}{who}: {each.why}")


def incident_lines(incident: Incident) -> Iterator[str]:
    """One incident."""
    finding = incident.cause
    code = code_of(finding.code)
    yield f"{severity_of(finding).value.upper()} {finding.code}: {code.title}"
    yield from _wrapped("  cause     ", finding.cause)
    yield from _wrapped("  where     ", where(finding))
    if finding.evidence:
        yield from _wrapped("  evidence  ", evidence_text(finding))
    yield from _wrapped("  fix       ", finding.fix or code.fix)
    yield from _wrapped(
        "  sure      ", f"{finding.confidence:.0%}; more: ciuic doctor explain {finding.code.removeprefix('CIUIC-')}"
    )
    for other in incident.collateral:
        if other.code == finding.code:
            continue
        yield from _wrapped("  follows   ", f"{other.code} {code_of(other.code).title} ({where(other)})")


def where(finding: Finding) -> str:
    """Ranks, modules and step in one line."""
    parts = [ranks_text(finding.ranks) if finding.ranks else "all ranks"]
    if finding.modules:
        shown = ", ".join(finding.modules[:MODULES_SHOWN])
        more = len(finding.modules) - MODULES_SHOWN
        parts.append(shown + (f" and {more} more" if more > 0 else ""))
    parts.append(f"since step {finding.step}" if finding.step else "from the start")
    return "; ".join(parts)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`rank 1`, `ranks 1, 3-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def evidence_text(finding: Finding) -> str:
    """`name value, name value`."""
    shown = list(finding.evidence.items())[:EVIDENCE_SHOWN]
    return ", ".join(f"{name} {_number(value)}" for name, value in shown)


def _number(value: float | int | str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < WHOLE_MAX else f"{value:.4g}"


def _wrapped(head: str, text: str) -> Iterator[str]:
    indent = " " * len(head)
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [head.rstrip()]

"""A finding: one thing that is wrong, who has it, since when, and how it is known."""

import enum
from typing import Any

import msgspec


class Severity(enum.StrEnum):
    """What a finding asks of a person."""

    NOTE = "note"  # worth knowing; never counts as an alarm
    WARNING = "warning"  # training is slower or other than it was meant
    CRITICAL = "critical"  # the result is wrong, or the run stands


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. The catalogue holds what is the same for all findings of a code."""

    code: str
    """As in the catalogue, CIUIC-A1."""
    cause: str
    """One sentence: what was seen, in this run's own names and numbers."""
    step: int
    """The first optimizer step at which it holds, from 1; 0: before the first."""
    ranks: tuple[int, ...] = ()
    """The ranks that have the fault, not those that suffer from it; empty: all of them alike."""
    modules: tuple[str, ...] = ()
    """Paths of the modules or parameters concerned, the first to look at first."""
    evidence: dict[str, float | int | str] = {}
    """Numbers that show it, units in their names."""
    fix: str = ""
    """One line; empty: the catalogue's."""
    confidence: float = 0.9
    """0 to 1: how often this is the right cause when the evidence looks like this."""
    severity: Severity | None = None
    """None: the catalogue's."""
    found_s: float = 0.0
    """Seconds since the epoch, of the collector's clock: when it was found first. The collector sets it."""

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """Two findings of one key are the same fault, seen again."""
        return self.code, self.modules[:1]


class Revised(msgspec.Struct, frozen=True, kw_only=True):
    """Takes the place of an earlier finding of the same key, be it surer or less sure: what looked dead was slow."""

    finding: Finding


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """A finding and what follows from it."""

    cause: Finding
    collateral: tuple[Finding, ...] = ()


class Blind(msgspec.Struct, frozen=True, kw_only=True):
    """Something that could not be looked at: not the same as healthy."""

    what: str
    why: str
    ranks: tuple[int, ...] = ()


def to_builtins(incidents: list[Incident], blind: list[Blind]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"incidents": msgspec.to_builtins(incidents), "could_not_look": msgspec.to_builtins(blind)}

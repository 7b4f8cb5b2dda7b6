"""What came of one case of the zoo."""

from dataclasses import dataclass, field
from typing import Any

TAIL = 2_000
"""Characters of what a rank wrote that are kept."""


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """How one rank ended."""

    exit_code: int | None
    """Negative: by this signal. None: still alive when the case was ended."""
    wall_s: float
    cpu_s: float
    """Processor time after the fork."""
    losses: tuple[str, ...]
    """As `float.hex`, in order, of all generations."""
    error: str
    """The end of what it wrote."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one case."""

    program: str
    case: str
    ranks: tuple[RankOutcome, ...]
    """Of a ledger run: one for each node."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """The doctor's incidents, the most likely cause first."""
    began_s: float
    """Seconds since the epoch, to compare with a finding's `found_s`."""
    last_step_s: float = 0.0
    """Seconds since the epoch when a rank logged its last loss; a hang begins then. 0: no rank logged any."""
    seconds: float

    @property
    def is_finished(self) -> bool:
        """Whether every rank came to its end by itself, without an error."""
        return all(rank.exit_code == 0 for rank in self.ranks)

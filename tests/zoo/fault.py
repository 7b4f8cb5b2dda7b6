"""What the catalogue says about a fault and about a program."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["step", "hang", "launch", "resume", "slow"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A mistake or a mishap, and what a doctor should say about it."""

    id: str
    title: str
    letter: str
    """Class A to L of the reference; M: a ledger run."""
    codes: tuple[str, ...]
    """Causes that count as right, the best first."""
    reported: tuple[str, ...] = ()
    """Case ids of the reference that have this mechanism. Empty: it is on nobody's list."""
    rank: int | None = None
    """The guilty rank. None: no rank is guiltier than the others."""
    module: str | None = None
    """Parameter or module path, or a prefix of it; a program may say it more exactly. None: no module is guilty."""
    kind: Kind = "step"
    steps: int = 20
    """By which step it should be found. Hangs are to be found before the collective's time-out."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set for all ranks before they start."""
    clock_offset_s: float = 0.0
    """How far the wall clock of rank 1 is ahead."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of the zoo: what applies to it."""

    name: str
    title: str
    faults: tuple[str, ...]
    variants: tuple[str, ...]
    """Clean: a doctor must keep silent. The first is `plain`."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """By fault: the guilty module in this program."""
    needs: tuple[str, ...] = ()
    """Python modules to load before the fork."""
    generations: int = 1
    """How often it is started for one case: 2 when it resumes."""
    runner: Literal["ranks", "cluster"] = "ranks"
    """What its processes are: ranks of one process group, or a hub, agents and their workers (see `cluster_runner`)."""

    def module_of(self, fault: Fault) -> str | None:
        """The guilty module of a fault in this program."""
        return self.modules.get(fault.id, fault.module)

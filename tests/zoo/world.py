"""What a program of the zoo is told, and the mishaps of machines that can befall any of them."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Zoo:
    """One rank of one case. Exactly one of `fault` and `variant` is not empty; `plain` is the first variant."""

    fault: str
    variant: str
    steps: int
    rank: int
    world: int
    folder: Path
    generation: int = 0
    """0 for the first start, 1 for the start that resumes."""
    patience_s: float = 12.0
    """Time-out of the program's collectives."""

    @property
    def patience(self) -> timedelta:
        return timedelta(seconds=self.patience_s)

    @property
    def checkpoint(self) -> Path:
        """Where the program saves; the same for all ranks and generations of a case."""
        return self.folder / "checkpoint.pt"

    def log(self, loss: Any) -> None:
        """Append a loss, bit for bit, to this rank's record."""
        with (self.folder / f"losses-{self.generation}-{self.rank}.txt").open("a") as file:
            file.write(float(getattr(loss, "detach", lambda: loss)()).hex() + "\n")

    def mishap(self, step: int) -> None:
        """What can happen to rank 1 between two steps without the program's help. Called where a batch is fetched."""
        if self.rank != 1 or step != 6:
            return
        if self.fault == "rank_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "rank_stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.fault == "stuck_outside":
            while True:
                time.sleep(0.01)
        elif self.fault == "exit_early":
            sys.exit(0)
        elif self.fault == "exception":
            raise ValueError("could not read sample 48")

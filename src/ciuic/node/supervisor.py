"""What to do with the worker: a state machine without processes, threads or clock.

Events in (`want`, `launched`, `exited`, time), instructions out (`tick`). The agent carries them out.
"""

import re
from typing import Literal

from ciuic.net.messages import Assignment, WorkerReport, WorkerState

Instruction = Literal["launch", "terminate", "kill"]
Phase = Literal["idle", "launching", "up", "stopping", "waiting"]

RESTART_WINDOW_S = 600.0
_KILL_AGAIN_S = 5.0
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 10.0
_POINTLESS = re.compile(r"error\[CIUIC-([12]\d\d|603)\].*", re.DOTALL)
"""Usage and access errors, and a link that is too slow: another start ends the same way."""


class Supervisor:
    """Brings the one worker of a node to where the hub wants it."""

    def __init__(self, *, grace_s: float) -> None:
        self.phase: Phase = "idle"
        self.current: Assignment | None = None
        """What the report is about."""
        self._grace_s = grace_s
        self._wanted: Assignment | None = None
        self._has_run = False
        self._settled: tuple[str, int] | None = None
        self._state: WorkerState = "none"
        self._exit_code: int | None = None
        self._detail = ""
        self._restarts = 0
        self._failed_at: list[float] = []
        self._budget = 0
        self._due = 0.0
        self._orders: list[Instruction] = []

    @property
    def report(self) -> WorkerReport:
        """What the hub is told."""
        if self.current is None:
            return WorkerReport()
        return WorkerReport(
            run_id=self.current.run_id,
            attempt=self.current.attempt,
            state=self._state,
            restarts=self._restarts,
            exit_code=self._exit_code,
            detail=self._detail,
        )

    # ---- events ----

    def want(self, assignment: Assignment | None, *, stop: bool, now: float) -> None:
        """The hub's wish: this run and attempt, or nothing (`stop`: nothing now, but the run still exists)."""
        self._has_run = assignment is not None
        self._wanted = None if stop else assignment
        changed = _key(self._wanted) != _key(self.current)
        if self.phase == "up" and changed:
            self.phase, self._due = "stopping", now + self._grace_s
            self._orders.append("terminate")
        elif self.phase in ("waiting", "launching") and changed:
            self._orders.clear()
            self._rest("stopped")
        self._reconsider()

    def grant(self, restarts: int) -> None:
        """How many restarts per 10 minutes the job of the current run allows."""
        self._budget = restarts

    def launched(self) -> None:
        """The processes run."""
        self.phase, self._state, self._exit_code = "up", "running", None

    def refused(self, detail: str) -> None:
        """The processes cannot be started, and trying again would not help."""
        self._detail = detail
        self._rest("failed")

    def exited(self, code: int, detail: str, now: float) -> None:
        """The processes have ended (or could not be started now)."""
        self._exit_code = code
        if self.phase == "stopping":
            self._rest("stopped")
            self._reconsider()
        elif code == 0:
            self._detail = ""
            self._rest("finished")
        else:
            self._detail = detail
            self._failed(now)

    def vacate(self, now: float, *, grace_s: float) -> None:
        """Stop what runs, with this grace (0: kill it now), and start nothing. `want` must not be called after this."""
        self._wanted = None
        if self.phase == "up":
            self.phase, self._due = "stopping", now + grace_s
            if grace_s > 0:
                self._orders.append("terminate")
        elif self.phase == "stopping":
            self._due = min(self._due, now + grace_s)
        elif self.phase in ("waiting", "launching"):
            self._orders.clear()
            self._rest("stopped")

    # ---- instructions ----

    def tick(self, now: float) -> list[Instruction]:
        """What is to be done now."""
        if self.phase == "waiting" and now >= self._due:
            self.phase = "launching"
            self._orders.append("launch")
        elif self.phase == "stopping" and now >= self._due:
            self._due = now + _KILL_AGAIN_S
            self._orders.append("kill")
        orders, self._orders = self._orders, []
        return orders

    def next_due(self) -> float | None:
        """When `tick` has something to do although nothing happens."""
        return self._due if self.phase in ("waiting", "stopping") else None

    # ---- inside ----

    def _reconsider(self) -> None:
        """Nothing runs: forget a run that is gone, start one that is wanted and has not ended here."""
        if self.phase != "idle":
            return
        if not self._has_run:
            self.current, self._settled = None, None
        if self._wanted is None or _key(self._wanted) == self._settled:
            return
        self.current, self.phase = self._wanted, "launching"
        self._state, self._exit_code, self._detail = "starting", None, ""
        self._restarts, self._failed_at, self._settled = 0, [], None
        self._orders.append("launch")

    def _failed(self, now: float) -> None:
        self._failed_at = [at for at in self._failed_at if now - at < RESTART_WINDOW_S]
        if len(self._failed_at) >= self._budget or _POINTLESS.fullmatch(self._detail):
            self._rest("failed")
            return
        self._failed_at.append(now)
        self._restarts += 1
        backoff_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (len(self._failed_at) - 1))
        self.phase, self._state, self._due = "waiting", "starting", now + backoff_s

    def _rest(self, state: WorkerState) -> None:
        """Nothing runs any more. A stopped run may be started again, a finished or failed attempt not."""
        self.phase, self._state = "idle", state
        self._settled = _key(self.current) if state != "stopped" else None


def _key(assignment: Assignment | None) -> tuple[str, int] | None:
    return None if assignment is None else (assignment.run_id, assignment.attempt)

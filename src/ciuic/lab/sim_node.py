"""A simulated node's agent: heartbeats by long poll, one worker, drains and goodbyes, as `node.agent` does them."""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ciuic.errors import CiuicError
from ciuic.hub.membership.state import Desired
from ciuic.lab.sim_time import Ask, Call, Line, Process
from ciuic.lab.sim_worker import SimWorker
from ciuic.net.messages import HeartbeatRequest, WorkerReport

if TYPE_CHECKING:
    from ciuic.lab.sim_desk import Desk

WORKER_GRACE_S = 20.0
"""A worker that was asked to end and has not is killed."""
RESTART_S = 2.0
"""From a worker's death to the next try."""


@dataclass(kw_only=True)
class SimNode:
    """One place: its identity, its line and how fast it is."""

    node_id: str
    line: Line
    step_s: float
    chance: random.Random
    is_witness: bool
    """Its workers run the whole machine."""
    agents: list["Agent"] = field(default_factory=list)
    """Those that live; the last one is the newest."""
    born: int = 0
    is_over: bool = False
    """Evicted: this identity never comes back."""
    hurt_until_s: float = 0.0
    """Until then it may rightly be thought dead."""


class Agent(Process):
    """One agent process."""

    def __init__(self, node: SimNode, desk: "Desk") -> None:
        super().__init__(desk.timeline, node.line, desk.hub)
        self.node, self.desk = node, desk
        node.born += 1
        node.agents.append(self)
        self.incarnation = f"{node.node_id}.{node.born}"
        self.worker: SimWorker | None = None
        self.is_draining = False
        self._report = WorkerReport()
        self._settled: tuple[str, int] | None = None
        """The attempt that has ended here for good."""
        self._sequence = self._revision = self._poll = 0
        self._beat_s = 2.0
        self._is_leaving = False

    # ---- heartbeat

    def beat(self) -> None:
        """Speak now; an earlier long poll does not matter any more."""
        self._poll += 1
        poll = self._poll
        Call(self, None, lambda reply: self._heard(poll, reply), renew=self._compose).send()

    def _compose(self) -> Ask:
        """A beat that was lost is not sent again: the next one is newer."""
        self._sequence += 1
        request = HeartbeatRequest(
            agent_incarnation=self.incarnation,
            sequence=self._sequence,
            known_revision=self._revision,
            wait_s=self._beat_s,
            location=self.node.node_id,
            worker=self._report,
            draining=self.is_draining,
        )
        node_id = self.node.node_id
        return lambda call: self.desk.beat(call, node_id, request)

    def _heard(self, poll: int, reply: Any) -> None:
        if poll != self._poll:
            return
        if isinstance(reply, CiuicError):
            self.end()  # superseded, evicted: nobody listens to this process any more
            return
        self._obey(reply)
        if poll == self._poll and self.is_alive:
            self.beat()

    def _obey(self, desired: Desired) -> None:
        self._revision, self._beat_s = desired.revision, desired.heartbeat_s
        if self.is_draining:
            return
        run = desired.run
        wanted = None if run is None or desired.stop_worker else (run.run_id, run.attempt)
        if self.worker is not None:
            if self.worker.key != wanted:
                self._ask_to_end("stopped")
            return
        if run is None:
            self._report, self._settled = WorkerReport(), None
        if wanted is not None and wanted != self._settled:
            self._launch(wanted)

    # ---- worker

    def _launch(self, key: tuple[str, int]) -> None:
        if self.worker is not None or self.is_draining:
            return
        self.worker = SimWorker(self, key)
        self._tell("running")
        self.worker.start()

    def worker_dies(self) -> None:
        """kill -9 of the worker alone; the agent starts another one."""
        if self.worker is None:
            return
        key = self.worker.key
        self.worker.kill()
        self.worker = None
        self._tell_of(key, "starting")
        self.later(RESTART_S, self._launch_again, key)

    def _launch_again(self, key: tuple[str, int]) -> None:
        if self._report.run_id == key[0] and self._report.state == "starting":
            self._launch(key)

    def worker_ended(self, worker: SimWorker, state: Any) -> None:
        """It has ended by itself."""
        if worker is not self.worker:
            return
        worker.kill()
        self.worker = None
        self._settled = worker.key if state != "stopped" else None
        self._tell_of(worker.key, state)
        if self.is_draining:
            self._say_goodbye()

    def _ask_to_end(self, reason: Any) -> None:
        worker = self.worker
        if worker is not None and not worker.is_leaving:
            worker.leave(reason)
            self.later(WORKER_GRACE_S, self.worker_ended, worker, "stopped")

    def _tell(self, state: Any) -> None:
        if self.worker is not None:
            self._tell_of(self.worker.key, state)

    def _tell_of(self, key: tuple[str, int], state: Any) -> None:
        run_id, attempt = key
        self._report = WorkerReport(run_id=run_id, attempt=attempt, state=state)
        self.beat()

    # ---- ends

    def drain(self) -> None:
        """Finish the step, push, leave."""
        if self.is_draining:
            return
        self.is_draining = True
        self.beat()
        if self.worker is None:
            self._say_goodbye()
        else:
            self._ask_to_end("drained")

    def _say_goodbye(self) -> None:
        if self._is_leaving:
            return
        self._is_leaving = True
        self._poll += 1
        node_id, incarnation = self.node.node_id, self.incarnation
        Call(self, lambda _: self.desk.leave(node_id, incarnation), lambda _: self.end()).send()

    def end(self) -> None:
        """Agent and worker are gone, at once."""
        self.kill()
        if self.worker is not None:
            self.worker.kill()
        if self in self.node.agents:
            self.node.agents.remove(self)

    def stop(self, seconds: float) -> None:
        """SIGSTOP of the whole node."""
        super().stop(seconds)
        if self.worker is not None:
            self.worker.stop(seconds)

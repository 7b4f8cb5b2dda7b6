"""The one place for a worker on a node: the supervisor's decisions, carried out with real processes and files."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from ciuic.errors import CiuicError, StorageError
from ciuic.job import parse_job
from ciuic.net.messages import Assignment, WorkerFault, WorkerReport
from ciuic.node.config import AgentConfig
from ciuic.node.identity import NodeIdentity
from ciuic.node.launch import WorkerProcess, check_code_allowed, describe_exit, plan_launch
from ciuic.node.logs import LogFile, LogShipper, WorkerOutput
from ciuic.node.supervisor import Instruction, Supervisor
from ciuic.node.workspace import prepare_run

_CANNOT_START = 1
_END_S = 10.0
MOST_RANKS = 64
"""Ranks that failed after the first are named up to this number."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """A worker's processes have all ended."""

    worker: WorkerProcess
    code: int
    """0, the exit code, or 128 + signal."""


class WorkerSeat:
    """Used from one thread; `on_exit` is called from another and must only pass the message on."""

    def __init__(
        self,
        config: AgentConfig,
        identity: NodeIdentity,
        shipper: LogShipper,
        on_exit: Callable[[WorkerExit], None],
    ) -> None:
        self._config, self._identity = config, identity
        self._shipper, self._on_exit = shipper, on_exit
        self._supervisor = Supervisor(grace_s=config.grace_s)
        self._worker: WorkerProcess | None = None
        self._output: WorkerOutput | None = None
        self._file: LogFile | None = None
        self._fault: WorkerFault | None = None
        """Where the worker failed last."""

    @property
    def report(self) -> WorkerReport:
        """What the hub is told."""
        report = self._supervisor.report
        return replace(report, fault=self._fault) if report.detail else report

    @property
    def is_empty(self) -> bool:
        """No process of a worker is left."""
        return self._worker is None

    @property
    def next_due(self) -> float | None:
        """When (monotonic seconds) `work` has something to do although nothing happens."""
        return self._supervisor.next_due()

    # ---- events ----

    def want(self, assignment: Assignment | None, *, stop: bool) -> None:
        """What the hub wants here."""
        self._supervisor.want(assignment, stop=stop, now=time.monotonic())

    def vacate(self, *, grace_s: float) -> None:
        """Stop the worker, with `grace_s` from SIGTERM to SIGKILL (0: SIGKILL now), and start no other."""
        self._supervisor.vacate(time.monotonic(), grace_s=grace_s)

    def ended(self, event: WorkerExit) -> None:
        """The processes of a worker have ended."""
        if event.worker is not self._worker or self._output is None:
            return
        self._worker = None
        on_request = self._supervisor.phase == "stopping"
        fault = self._output.fault()
        self._fault = WorkerFault(
            rank=fault.rank,
            where=fault.where,
            collateral=list(fault.collateral[:MOST_RANKS]),
            log=str(self._file.path) if self._file is not None else "",
        )
        detail = describe_exit(event.code, fault.line, on_request=on_request)
        self._supervisor.exited(event.code, detail, time.monotonic())
        text = f"the worker has ended: {detail}"
        if self._supervisor.phase == "waiting":
            text += f"; restart {self.report.restarts} follows"
        self._output.say(text)
        _log.info("%s", text)

    def work(self) -> None:
        """Carry out what is due."""
        for order in self._supervisor.tick(time.monotonic()):
            self._carry_out(order)

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.join(_END_S)
        self._close_file()

    # ---- instructions ----

    def _carry_out(self, order: Instruction) -> None:
        if order == "launch":
            self._launch()
        elif self._worker is not None and order == "terminate":
            self._worker.terminate()
        elif self._worker is not None:
            _log.warning("the worker has not ended in time: killing it")
            self._worker.kill()

    def _launch(self) -> None:
        assignment = self._supervisor.current
        if assignment is None:
            return
        try:
            self._worker = self._start(assignment)
        except StorageError as error:  # the disk may have room again later
            _log.warning("the worker was not started: %s", error)
            self._supervisor.exited(_CANNOT_START, f"error[{error.code}]: {error}", time.monotonic())
        except CiuicError as error:
            _log.error("the worker was not started: %s", error)
            self._supervisor.refused(f"error[{error.code}]: {error}")
        else:
            self._supervisor.launched()
            _log.info("%s: worker started as process %d", assignment.run_id, self._worker.pid)

    def _start(self, assignment: Assignment) -> WorkerProcess:
        job = parse_job(assignment.job)
        self._supervisor.grant(job.fault.restarts)
        check_code_allowed(job, allow_code=self._config.allow_code)
        files = prepare_run(self._identity, self._config.url, assignment, job)
        self._close_file()
        self._file = LogFile(files.log)
        launch = plan_launch(files, job, home=self._config.home, worker_command=self._config.worker_command)
        self._output = WorkerOutput(assignment.run_id, launch.ranks, self._file, self._shipper)
        return WorkerProcess(launch, on_line=self._output.take, on_exit=self._pass_on)

    def _pass_on(self, worker: WorkerProcess, code: int) -> None:
        self._on_exit(WorkerExit(worker=worker, code=code))

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

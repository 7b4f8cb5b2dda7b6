"""Start the training processes of a run, under the guard, and follow their output and their end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from ciuic.errors import CodeNotAllowedError, StorageError
from ciuic.job import Job
from ciuic.net.probe import usable_cpus
from ciuic.node import guard
from ciuic.node.lines import LineSplitter
from ciuic.node.logs import Stream
from ciuic.node.workspace import RunFiles

WORKER = ("-m", "ciuic.train.worker")
_READ_BYTES = 64 * 1024
DRAINED = 75
"""Exit code of a worker that left before the run was complete (as ciuic.train.runfile says it)."""
_SECRETS = ("CIUIC_TOKEN",)
"""Variables of the agent that a worker has no business with."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything needed to start the processes of a run on this node."""

    command: list[str]
    environment: dict[str, str]
    ranks: int


def check_code_allowed(job: Job, *, allow_code: bool) -> None:
    """Raises CodeNotAllowedError for a job with code of its own on a node whose owner did not allow that."""
    source = "entry" if job.model.entry else "command" if job.model.command else ""
    if source and not allow_code:
        raise CodeNotAllowedError(
            "this node does not run code from jobs",
            cause=f"the job has model.{source}",
            next="if you trust whoever submits jobs, join with --allow-code",
        )


def plan_launch(files: RunFiles, job: Job, *, home: Path, worker_command: list[str] | None = None) -> Launch:
    """One rank is started directly; more through torchrun, because importing torch twice would double the start."""
    run_file = ["--run-file", str(files.run_file)]
    ranks = job.nodes.ranks
    if ranks == 1:
        command = [*(worker_command or [sys.executable, *WORKER]), *run_file]
    else:
        tail = ["--no-python", *worker_command] if worker_command else list(WORKER)
        command = [*_torchrun(ranks, files.torchrun), *tail, *run_file]
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    environment |= {
        "CIUIC_AGENT_PID": str(os.getpid()),
        "CIUIC_HOME": str(home),
        "CIUIC_RUN_FILE": str(files.run_file),
        "PYTHONUNBUFFERED": "1",
    }
    sharing = ranks * agents_here()
    if sharing > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // sharing)))
    return Launch(command=command, environment=environment, ranks=ranks)


def agents_here() -> int:
    """How many agents run on this machine, this one included: their workers share its processors.

    Without that, each torch process would start a thread per processor, and all would be several times slower.
    """
    found = 0
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:  # it has ended, or is not ours to see
            continue
        places = [i for i, word in enumerate(words) if word == "ciuic.cli.main" or Path(word).name == "ciuic"]
        found += any(words[i + 1 : i + 3] == ["node", "join"] for i in places)
    return max(1, found)


def _torchrun(ranks: int, logs: Path) -> list[str]:
    # 127.0.0.1 everywhere: torchrun's own choice is the host name, which often does not resolve to this machine.
    # The role names the prefix of each line: [rank0]:
    options = ["--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", "0", "--role", "rank"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return [sys.executable, "-m", "torch.distributed.run", *options, "--tee", "3", "--log-dir", str(logs)]


class WorkerProcess:
    """The guard with everything below it. `on_line` and `on_exit` are called from threads of this object."""

    def __init__(
        self, launch: Launch, *, on_line: Callable[[Stream, str], None], on_exit: Callable[["WorkerProcess", int], None]
    ) -> None:
        """Starts it. Raises StorageError when the machine cannot start a process."""
        self._on_line, self._on_exit = on_line, on_exit
        self._killed = False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *launch.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=launch.environment,
                start_new_session=True,  # a Ctrl-C at the terminal reaches the agent only, which then drains
                bufsize=0,
            )
        except OSError as error:
            raise StorageError("the worker cannot be started", cause=str(error)) from error
        pipes: tuple[tuple[Stream, IO[bytes] | None], ...] = (
            ("out", self._process.stdout),
            ("err", self._process.stderr),
        )
        readers = [self._reader(stream, pipe) for stream, pipe in pipes if pipe is not None]
        self._waiter = threading.Thread(target=self._wait, args=(readers,), name="ciuic-worker", daemon=True)
        self._waiter.start()

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM to the worker: finish the step, push, detach."""
        self._order(b"T")

    def kill(self) -> None:
        """End everything at once; the second time the guard itself."""
        if self._killed:
            self._process.kill()
        self._killed = True
        self._order(b"K")

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended, and all its output was passed on, within `timeout_s`."""
        self._waiter.join(timeout_s)
        return not self._waiter.is_alive()

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended already
            if self._process.stdin is not None:
                self._process.stdin.write(order)

    def _reader(self, stream: Stream, pipe: IO[bytes]) -> threading.Thread:
        thread = threading.Thread(target=self._read, args=(stream, pipe), name=f"ciuic-worker-{stream}", daemon=True)
        thread.start()
        return thread

    def _read(self, stream: Stream, pipe: IO[bytes]) -> None:
        splitter = LineSplitter()
        with pipe:
            while data := pipe.read(_READ_BYTES):
                for text in splitter.feed(data):
                    self._on_line(stream, text)
        for text in splitter.close():
            self._on_line(stream, text)

    def _wait(self, readers: list[threading.Thread]) -> None:
        code = self._process.wait()
        for reader in readers:
            reader.join()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._on_exit(self, code if code >= 0 else 128 - code)


def describe_exit(code: int, exception_line: str, *, on_request: bool = False) -> str:
    """Why a worker ended, in one line; `on_request`: the agent had asked it to."""
    if code == 128 + signal.SIGKILL and not on_request:
        return "killed by SIGKILL" + ("" if exception_line.startswith("error[") else " (perhaps out of memory)")
    if on_request:
        return "on request" if code in (0, DRAINED) else f"on request, exit code {code}"
    if exception_line:
        return exception_line
    if code > 128 and code - 128 in set(signal.Signals):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"

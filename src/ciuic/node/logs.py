"""The worker's output is kept in a file and sent to the hub.

Nothing here ever makes the worker wait: lines go to a file and to a bounded buffer, and a thread of its own sends them.
"""

import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO, Literal

from ciuic.errors import CiuicError, StorageError, UnreachableError
from ciuic.net.client import HubClient, backoff_s
from ciuic.net.messages import LogLine, LogRequest, Ok
from ciuic.node.lines import LAUNCHER_RANK, ExceptionFinder, Fault, split_rank

Stream = Literal["out", "err", "agent"]
_log = logging.getLogger(__name__)


class LogFile:
    """The worker's output on this machine: `log`, and `log.1` with what came before it."""

    def __init__(self, path: Path, *, limit_bytes: int = 16 * 1024 * 1024) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._complained = False

    def write(self, line: LogLine) -> None:
        """Append one line. A full disk costs the log, not the worker."""
        where = "agent" if line.stream == "agent" else f"{line.rank}" if line.rank >= 0 else "torchrun"
        data = f"{line.time:.3f} {where} {line.stream} {line.text}\n".encode(errors="replace")
        with self._lock:
            try:
                self._append(data)
            except OSError as error:
                if not self._complained:
                    _log.warning("%s cannot be written: %s; the worker goes on without it", self.path, error)
                self._complained = True

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()
        if self._file.tell() + len(data) > self._limit_bytes:
            self._file.close()
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            self._file = open(self.path, "ab")  # noqa: SIM115
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class LogShipper:
    """Sends lines to the hub about once a second, again after outages, from a bounded buffer.

    When the buffer is full the oldest lines are dropped and counted; the file on the node has them all. A batch whose
    acknowledgement was lost is sent again, so a line may arrive twice.
    """

    BATCH_BYTES = 256 * 1024
    BATCH_LINES = 1000
    _LINE_OVERHEAD_BYTES = 100

    def __init__(self, client: HubClient, *, period_s: float = 1.0, limit_bytes: int = 4 * 1024 * 1024) -> None:
        self._client = client
        self._period_s = period_s
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, LogLine]] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._batch: LogRequest | None = None
        self._hub_is_away = False
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="ciuic-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, run_id: str, line: LogLine) -> None:
        """Queue one line; never blocks."""
        with self._lock:
            self._waiting.append((run_id, line))
            self._waiting_bytes += self._size(line)
            if self._waiting_bytes >= self.BATCH_BYTES and not self._hub_is_away:
                self._wake.set()
            while self._waiting_bytes > self._limit_bytes:
                _, oldest = self._waiting.popleft()
                self._waiting_bytes -= self._size(oldest)
                self._dropped += 1

    def close(self, *, deadline_s: float) -> None:
        """Send what is left, for at most `deadline_s`."""
        self._ending = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                self._client.interrupt()
                self._thread.join(1.0)

    def _run(self) -> None:
        failures = 0
        while True:
            self._wake.wait(backoff_s(failures) if failures else self._period_s)
            self._wake.clear()
            ending = self._ending  # read before sending: what is added later than `close` may be lost
            failures = 0 if self._send_all() else failures + 1
            self._hub_is_away = failures > 0
            if ending:
                self._client.close()
                return

    def _send_all(self) -> bool:
        """Send everything queued; False when the hub cannot take it now."""
        while batch := self._batch or self._next_batch():
            self._batch = batch
            try:
                self._client.call("POST", "/v1/node/logs", batch, Ok)
            except (UnreachableError, StorageError):
                return False
            except CiuicError as error:  # the run is gone, or we are: these lines have no place to go
                _log.info("the hub does not take %d log lines of %s: %s", len(batch.lines), batch.run_id, error.message)
            self._batch = None
        return True

    def _next_batch(self) -> LogRequest | None:
        with self._lock:
            if not self._waiting:
                return None
            run_id, size = self._waiting[0][0], 0
            lines = [self._dropped_line()] if self._dropped else []
            while self._waiting and self._waiting[0][0] == run_id and len(lines) < self.BATCH_LINES:
                if size >= self.BATCH_BYTES:
                    break
                _, line = self._waiting.popleft()
                size += self._size(line)
                lines.append(line)
            self._waiting_bytes -= size
            return LogRequest(run_id=run_id, lines=lines)

    def _dropped_line(self) -> LogLine:
        text = f"{self._dropped} lines were not sent: more than the buffer holds; the log file on the node has them"
        self._dropped = 0
        return LogLine(time=self._waiting[0][1].time, rank=LAUNCHER_RANK, stream="agent", text=text)

    def _size(self, line: LogLine) -> int:
        return len(line.text) + self._LINE_OVERHEAD_BYTES


class WorkerOutput:
    """Where the lines of one start of a worker go: the file, the hub, and the search for the exception."""

    def __init__(self, run_id: str, ranks: int, file: LogFile, shipper: LogShipper) -> None:
        self._run_id, self._ranks = run_id, ranks
        self._file, self._shipper = file, shipper
        self._finder = ExceptionFinder()
        self._lock = threading.Lock()

    def take(self, stream: Stream, text: str) -> None:
        """One line of the worker's stdout ("out") or stderr ("err"); from any thread."""
        rank, text = (0, text) if self._ranks == 1 else split_rank(text)
        with self._lock:
            self._finder.see(rank, stream, text)
            self._keep(rank, stream, text)

    def say(self, text: str) -> None:
        """A line of the agent about the worker."""
        with self._lock:
            self._keep(LAUNCHER_RANK, "agent", text)

    def fault(self) -> Fault:
        """Why it failed, as far as its output says."""
        with self._lock:
            return self._finder.fault()

    def _keep(self, rank: int, stream: Stream, text: str) -> None:
        line = LogLine(time=time.time(), rank=rank, stream=stream, text=text)
        self._file.write(line)
        self._shipper.add(self._run_id, line)

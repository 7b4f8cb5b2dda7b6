"""Where the time of a training thread goes: computing, waiting for or working on communication, loading data."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median


@dataclass(kw_only=True)
class Meter:
    """Counters of one worker; written by the training thread, read by the reporter."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    pushes: int = 0
    communication_s: float = 0.0
    communication_cpu_s: float = 0.0
    """Processor time of the training thread on communication."""
    data_s: float = 0.0
    evaluation_s: float = 0.0
    longest_stall_s: float = 0.0
    _started_s: float | None = None
    _ended_s: float | None = None
    _last_step_s: float | None = None
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=101))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """The first batch is about to be loaded."""
        if self._started_s is None:
            self._started_s = self._last_step_s = time.perf_counter()

    def end(self) -> None:
        """Training is over: wall time stands still."""
        if self._ended_s is None:
            self._ended_s = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Since the first batch."""
        if self._started_s is None:
            return 0.0
        return (self._ended_s or time.perf_counter()) - self._started_s

    @property
    def compute_s(self) -> float:
        """Everything that is neither communication, data nor evaluation."""
        return max(0.0, self.wall_s - self.communication_s - self.data_s - self.evaluation_s)

    @property
    def step_s(self) -> float:
        """Median time of a step, without communication."""
        with self._lock:
            return median(self._step_s) if self._step_s else 0.0

    def step(self, samples: int, tokens: int) -> None:
        """One inner step is done; called before its communication is counted."""
        now = time.perf_counter()
        self.steps += 1
        self.samples += samples
        self.tokens += tokens
        with self._lock:
            if self._last_step_s is not None:
                self._step_s.append(now - self._last_step_s)

    def boundary(self) -> None:
        """The next step begins."""
        self._last_step_s = time.perf_counter()

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Work on or wait for communication in the training thread."""
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.communication_s += time.perf_counter() - wall
            self.communication_cpu_s += time.thread_time() - cpu

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation, which is neither computing nor communication. May lie inside `communicating`."""
        wall = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - wall
            self.evaluation_s += spent
            self.communication_s -= spent

    def stalled(self, seconds: float) -> None:
        """A step boundary was blocked on the hub for this long."""
        self.longest_stall_s = max(self.longest_stall_s, seconds)

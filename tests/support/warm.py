"""Programs that are forked from a process which has imported them once: a start costs milliseconds instead of a second.

    started = warm_popen([sys.executable, "-m", "ciuic.cli.main", "hub", "start"], env=environment, stdout=file)

What is started is a process of its own in every respect, also in /proc; only the imports are done. In a soak
(`--hypothesis-profile=soak`) a real program is started.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from examples import is_soak

SERVER = Path(__file__).with_name("warm_server.py")
START_S = 60.0
ROOM_BYTES = 16_384
"""For the command line and the environment that /proc shows of what is forked."""


class WarmProcess:
    """What is needed of `subprocess.Popen`."""

    def __init__(self, pid: int, status: int, stdout: IO[str] | None) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout_s):
                    return None
            said = os.read(self._status, 64)
            os.close(self._status)
            self.returncode = int(said) if said else -signal.SIGKILL  # the server itself was killed, and all with it
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Started = WarmProcess | subprocess.Popen[str]


class _Server:
    """One per test process, started when it is needed; it ends, with all that it has forked, when its line closes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            line = self._line or self._connect()
            body = json.dumps(request).encode()
            socket.send_fds(line, [len(body).to_bytes(4, "little")], descriptors)
            line.sendall(body)
            return int(line.recv(16))

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(theirs.fileno()), self.kind, " " * ROOM_BYTES],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment(),
                start_new_session=True,
            )
        ours.settimeout(START_S)
        self._line = ours
        return ours

    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join(part for part in sys.path if part)
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return {**os.environ, **one, "PYTHONPATH": paths, "CIUIC_TEST_ROOM": " " * ROOM_BYTES}


_light, _heavy = _Server("light"), _Server("heavy")


def warm_popen(
    arguments: list[str],
    *,
    env: dict[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[Any] = subprocess.DEVNULL,
    stderr: int | IO[Any] = subprocess.DEVNULL,
    start_new_session: bool = False,
    forks_workers: bool = False,
    warm: bool = True,
) -> Started:
    """`arguments`: an interpreter with -m MODULE, -c CODE or FILE, and its words. A piped stdout is text.

    `forks_workers`: it is an agent, and what it starts for a run is a fork as well, of torch and all.
    """
    if is_soak() or not warm:
        options: dict[str, Any] = {"env": env, "stdin": stdin, "stdout": stdout, "stderr": stderr}
        return subprocess.Popen(arguments, text=True, start_new_session=start_new_session, **options)
    reader, writer = os.pipe() if stdout == subprocess.PIPE else (-1, -1)
    status, theirs = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    out = writer if writer >= 0 else _descriptor(stdout, nothing)
    error = out if stderr == subprocess.STDOUT else _descriptor(stderr, nothing)
    request = {"arguments": arguments, "environment": env, "folder": os.getcwd(), "session": start_new_session}
    request["forks_workers"] = forks_workers
    try:
        pid = (_heavy if forks_workers else _light).start(request, [nothing, out, error, theirs])
    finally:
        for descriptor in (theirs, nothing, *([writer] if writer >= 0 else [])):
            os.close(descriptor)
    return WarmProcess(pid, status, os.fdopen(reader, "r") if reader >= 0 else None)


def _descriptor(given: int | IO[Any], nothing: int) -> int:
    if given == subprocess.DEVNULL:
        return nothing
    return given if isinstance(given, int) else given.fileno()

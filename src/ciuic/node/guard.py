"""A small process between the agent and the worker that makes sure nothing of the worker outlives the agent.

    agent  --stdin pipe-->  guard  -->  worker (or torchrun --> ranks, each in a session of its own)

Why not a signal on parent death alone: torchrun starts its ranks in sessions of their own, so killing torchrun leaves
them behind. The guard is a "child subreaper" (prctl(2)): whatever in the worker's tree loses its parent becomes the
guard's child, so it finds and ends everything. The kernel closes the agent's end of the pipe even on kill -9; on end
of file the guard kills the whole tree. The worker itself gets SIGKILL should the guard die (PR_SET_PDEATHSIG).

Control bytes on stdin: T = send SIGTERM to the worker, K = kill everything now. The exit code is the worker's, or
128 + signal. Standard library only, started as a script with `python -I -S`: it costs a few milliseconds and megabytes.
"""

import ctypes
import os
import select
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_GRACE_S = 2.0
"""Helpers of a worker that has ended get SIGTERM and this long before SIGKILL."""
_POLL_S = 0.02
_GIVE_UP_S = 10.0
_CANNOT_START = 127


def main(command: list[str]) -> int:
    """Run `command` until it ends or must end; its exit code."""
    adopt_orphans()
    wake_fd = _wake_on_signals()
    worker = _start(command, os.getpid())
    signal.signal(signal.SIGTERM, lambda *_: _signal(worker, signal.SIGTERM))
    code = _watch(worker, wake_fd)
    _end_leftovers()
    return code


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _start(command: list[str], guard_pid: int) -> int:
    """Start the worker in a session of its own, without our control pipe; its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard_pid:  # the guard died in between
        os._exit(_CANNOT_START)
    _exec(command)


def _exec(command: list[str]) -> NoReturn:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(_CANNOT_START)


def _watch(worker: int, wake_fd: int) -> int:
    """Follow the control pipe until the worker has ended; its exit code."""
    control = [0]
    while True:
        ready, _, _ = select.select([wake_fd, *control], [], [])
        if wake_fd in ready:
            os.read(wake_fd, 4096)
        code = _reap(worker)
        if code is not None:
            return code
        if 0 in ready:
            orders = os.read(0, 64)
            if not orders or b"K" in orders:
                return _kill_everything(worker)
            _signal(worker, signal.SIGTERM)


def _reap(worker: int) -> int | None:
    """Collect whatever has ended; the worker's exit code once it is among them."""
    code: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == worker:
            raw = os.waitstatus_to_exitcode(status)
            code = raw if raw >= 0 else 128 - raw


def _kill_everything(worker: int) -> int:
    code = 128 + signal.SIGKILL
    give_up = time.monotonic() + _GIVE_UP_S
    while _has_children() and time.monotonic() < give_up:
        for pid in descendants(os.getpid()):
            _signal(pid, signal.SIGKILL)
        ended = _reap(worker)
        code = code if ended is None else ended
        time.sleep(_POLL_S)
    return code


def _end_leftovers() -> None:
    """The worker has ended: end what it left running."""
    for pid in descendants(os.getpid()):
        _signal(pid, signal.SIGTERM)
    patience = time.monotonic() + LEFTOVER_GRACE_S
    while _has_children() and time.monotonic() < patience:
        _reap(0)
        time.sleep(_POLL_S)
    _kill_everything(0)


def descendants(ancestor: int) -> list[int]:
    """Process ids of all descendants, from /proc (empty where there is none)."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            children.setdefault(_parent_of(name), []).append(int(name))
    found = list(children.get(ancestor, []))
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def _parent_of(name: str) -> int:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):  # it ended while we looked
        return -1


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # it has ended, or is not ours
        return


def _wake_on_signals() -> int:
    """A descriptor that becomes readable when a child ends."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return read_fd


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler, so that the signal reaches the wake-up descriptor."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))

"""Processes that are killed with SIGKILL at their n-th write point, or at any moment.

Runs in a clean process of one thread (`python kill_cases.py CASE FOLDER`), never inside pytest, because it forks.
"""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

_POINTS = ("fsync", "replace", "ftruncate", "unlink", "mkdir")


class Bomb:
    """Kills this process before its n-th call that changes a disk; a write counts twice: before it and half-way."""

    def __init__(self, at: int) -> None:
        self.left = at

    def point(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        for name in _POINTS:
            setattr(os, name, self._counted(getattr(os, name)))
        really_write = os.write

        def write(descriptor: int, data: Any) -> int:
            self.point()
            if self.left == 1:
                really_write(descriptor, memoryview(data)[: len(data) // 2])
            self.point()
            return really_write(descriptor, data)

        os.write = write  # type: ignore[assignment]

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.point()
            return real(*args, **kwargs)

        return call


def fork(work: Callable[[Connection], None], *, bomb: int = 0) -> tuple[int, Connection]:
    """Run `work(its end of a pipe)` in a new process; returns its id and our end."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    code = 1
    try:
        if bomb:
            Bomb(bomb).install()
        work(theirs)
        code = 0
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a process; its exit status, negative when a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_after(pid: int, seconds: float) -> None:
    """SIGKILL a process after a while."""
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    ended(pid)


def all_received(ours: Connection) -> list[Any]:
    """Everything that a process said until it ended."""
    found = []
    while True:
        try:
            found.append(ours.recv())
        except (EOFError, ConnectionResetError):
            ours.close()
            return found

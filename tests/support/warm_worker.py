"""Guards and workers that are forks of a warmed agent, which has imported torch: a worker starts in milliseconds.

Processes, sessions, signals, pipes and the guard's own code are those of the real thing; what differs is that a program
is not loaded by exec, and that a module imported before is not imported again. In the agent `install` puts `Forked`
in the place of `subprocess.Popen`.
"""

import atexit
import ctypes
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

import structlog

from ciuic.node import guard, launch

_ALL = os.sysconf("SC_OPEN_MAX")
_REAL_EXEC = os.execvp
PYTHON = ("python", "python3", sys.executable)


def install() -> None:
    """From now on this agent forks what it starts for a run."""
    launch.subprocess = types.SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)  # type: ignore[assignment]  # ty: ignore[invalid-assignment]


class Forked:
    """What the agent needs of `Popen` to run the guard."""

    def __init__(self, arguments: list[str], *, env: dict[str, str], **_: Any) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_err, theirs_err = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                _be_guard(arguments, env, (theirs_in, theirs_out, theirs_err))
            finally:
                os._exit(70)
        for descriptor in (theirs_in, theirs_out, theirs_err):
            os.close(descriptor)
        self.stdin = open(ours_in, "wb", buffering=0)  # noqa: SIM115 - closed by the agent
        self.stdout, self.stderr = open(ours_out, "rb", buffering=0), open(ours_err, "rb", buffering=0)  # noqa: SIM115

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _be_guard(arguments: list[str], env: dict[str, str], streams: tuple[int, int, int]) -> NoReturn:
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, _ALL)
    os.setsid()
    forget(arguments, env)
    guard._exec = _be_worker
    os._exit(guard.main(arguments[4:]))  # after: python -I -S guard.py


def _be_worker(command: list[str]) -> NoReturn:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.closerange(3, _ALL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.execvp = _exec_again
    _exec_again(command[0], command)


def _exec_again(file: str, command: list[str]) -> NoReturn:
    """What an exec of an interpreter comes to; other programs are executed."""
    if file not in PYTHON:
        _REAL_EXEC(file, command)
    forget(command, dict(os.environ))
    os._exit(run(command[1:]))


def forget(arguments: list[str], env: dict[str, str]) -> None:
    """Nothing of what this process was before the fork is left over in what programs look at."""
    gc.freeze()  # what is garbage now must not close descriptors of the new program
    os.environ.clear()
    os.environ.update(env)
    show_as(arguments, env)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    atexit._clear()
    atexit.register(logging.shutdown)
    structlog.reset_defaults()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)


def run(words: list[str]) -> int:
    """Run what an interpreter with these words would run, with its end; the exit code."""
    code = 0
    try:
        become(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == 1 and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the interpreter's own last resort
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # ty: ignore[invalid-argument-type]
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def become(words: list[str]) -> None:
    """`-m MODULE`, `-c CODE` or a file, after options that change nothing here."""
    while words[0] in ("-P", "-u"):
        words = words[1:]
    if words[0] == "-m":
        sys.argv = [words[1], *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def show_as(arguments: list[str], env: dict[str, str]) -> None:
    """Write command line and environment where the kernel reads them for /proc, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(fields[n]) for n in (45, 46, 47, 48))
    _write(arg_start, arg_end, arguments)
    _write(env_start, env_end, [f"{name}={value}" for name, value in env.items()])


def _write(start: int, end: int, words: list[str]) -> None:
    room = end - start
    data = b"\0".join(word.encode(errors="surrogateescape") for word in words)[: room - 1]
    ctypes.memset(start, 0, room)
    ctypes.memmove(start, data, len(data))

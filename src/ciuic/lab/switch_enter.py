"""Run a command in a network namespace: `python -I -S switch_enter.py HANDLE NICE COMMAND...` becomes COMMAND.

HANDLE is a path that names the namespace (`/proc/PID/ns/net`, or a descriptor below `/proc/PID/fd`), or several with
commas between them (network and host name); NICE is the niceness, 0 for an ordinary process. Standard library only, so
that it costs a few milliseconds.
"""

import contextlib
import ctypes
import os
import sys

_CLONE_NEWNET = 0x40000000
_ANY_KIND = 0
CANNOT_START = 127


def set_namespace(fd: int, kind: int = _CLONE_NEWNET) -> None:
    """Move the calling thread into the namespace that `fd` refers to (setns(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def set_nice(nice: int) -> None:
    """Niceness of this process and its session (Linux weighs sessions first); as far as the kernel allows it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        with open("/proc/self/autogroup", "w") as session:
            session.write(str(nice))


def main(handle: str, nice: int, command: list[str]) -> int:
    """Never returns when COMMAND can be started."""
    if nice:
        set_nice(nice)
    try:
        for path in handle.split(","):
            set_namespace(os.open(path, os.O_RDONLY | os.O_CLOEXEC), _ANY_KIND)
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))

"""What the training thread is doing, seen from another thread."""

import contextlib
import sys
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FRAMES_MAX = 5
FRAMEWORKS = frozenset({"accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "transformers"})
"""Packages that call collectives at many places on behalf of one line of the program."""
NOT_THE_PROGRAM = FRAMEWORKS | {
    *("torch", "ciuic", "typing_extensions", "contextlib", "functools", "threading", "warnings"),
}
"""Packages whose lines nobody can change, and the wrappers of functions."""
_CODES: dict[int, tuple[CodeType, bool, str, str]] = {}
"""By id: a code, whether it is the program's, the name of its file, and the framework that it belongs to."""
CODES_MAX = 4096
CALLERS_MAX = 12
STEP_DEPTH_MAX = 64
STEP_FILES = ("torch/optim/optimizer.py", "ciuic/doctor/probe/hooks.py")
SAVING = ("save", "checkpoint")
"""Parts of the names of functions that save."""


def frames_of(thread: int) -> list[FrameType]:
    """The frames of a thread, innermost first; empty when it has ended."""
    frame = sys._current_frames().get(thread)
    found: list[FrameType] = []
    while frame is not None and len(found) < 200:
        found.append(frame)
        frame = frame.f_back
    return found


def described(frames: list[FrameType]) -> list[str]:
    """`file:line in function` of the program's nearest frame, then of the innermost frames."""
    own = next((frame for frame in frames if is_program(frame)), None)
    chosen = ([own] if own is not None else []) + [frame for frame in frames[:FRAMES_MAX] if frame is not own]
    return [where(frame) for frame in chosen[:FRAMES_MAX]]


def site() -> str:
    """File, line and function of the nearest frame of this thread that belongs to the program. Asked at every call.

    Where the program has called a framework, also the two innermost functions of that framework.
    """
    frame = sys._getframe(1)
    outermost = frame
    framework, through, functions = "", "", 0
    while frame is not None:
        code = frame.f_code
        known = _CODES.get(id(code))
        if known is None or known[0] is not code:
            package = _package(frame)
            name = code.co_filename.rsplit("/", 1)[-1]
            if len(_CODES) >= CODES_MAX:  # a program that makes code as it goes
                _CODES.clear()
            known = _CODES[id(code)] = code, is_program(frame), name, package if package in FRAMEWORKS else ""
        if known[1]:
            return f"{known[2]}:{frame.f_lineno} in {code.co_name}{through}"
        if known[3] and known[3] != framework:
            framework, through, functions = known[3], f" ({code.co_name})", 1
        elif known[3] and functions == 1:
            through, functions = f" ({code.co_name}: {through[2:]}", 2
        outermost, frame = frame, frame.f_back
    return where(outermost)


def where(frame: FrameType) -> str:
    """`file:line in function`."""
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"[:120]


def is_program(frame: FrameType) -> bool:
    """Whether a frame is neither torch's nor a framework's nor the doctor's."""
    return _package(frame) not in NOT_THE_PROGRAM and not frame.f_code.co_filename.startswith("<")


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def in_torch(frames: list[FrameType]) -> bool:
    """Whether the innermost frame is torch's (or the doctor's, which only passes on to torch)."""
    return bool(frames) and _package(frames[0]) in ("torch", "ciuic")


def is_saving(frames: list[FrameType]) -> bool:
    """Whether a function has a name that speaks of saving; ask only outside of forward and backward passes."""
    names = {frame.f_code.co_name.lower() for frame in frames}
    return any(word in name and "load" not in name for name in names for word in SAVING)


class Processor:
    """Processor time of one thread, read from another."""

    def __init__(self) -> None:
        self._thread, self._last = 0, (0.0, 0.0)

    def share(self, thread: int) -> float | None:
        """Of the wall time since the last call, 0 to 1; None the first time, of a thread that has ended, or where
        the system does not tell."""
        if thread not in sys._current_frames():  # to ask for the clock of a thread that has ended may end the process
            return None
        try:
            clock = time.pthread_getcpuclockid(thread)
            now = time.monotonic(), time.clock_gettime(clock)
        except (AttributeError, OSError):
            return None
        last, known = self._last, self._thread == thread
        self._thread, self._last = thread, now
        wall_s = now[0] - last[0]
        return min(1.0, max(0.0, (now[1] - last[1]) / wall_s)) if known and wall_s > 0 else None


def all_queued_s() -> float:
    """How long the threads of this process together could run and got no processor (Linux; elsewhere 0)."""
    found = 0.0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended meanwhile
            found += int(path.read_bytes().split()[1]) / 1e9
    return found


def is_called_by(module: str) -> bool:
    """Whether one of the nearest frames of this thread belongs to a module."""
    frame = sys._getframe(1)
    for _ in range(CALLERS_MAX):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__") == module:
            return True
    return False


def is_stepping(optimizer: Any) -> bool:
    """Whether this thread is inside a step of an optimizer: torch's wrapper around it, or the probe's around that of a
    scaler, is among the frames."""
    frame = sys._getframe(1)
    for _ in range(STEP_DEPTH_MAX):
        name = frame.f_code.co_filename
        if name.endswith(STEP_FILES):
            given = frame.f_locals
            if given.get("self") is optimizer or given.get("inner") is optimizer:
                return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False

"""Work in a forked child: it has torch loaded already, and its crash is an answer.

All children are forked before this process starts a thread. One that has to wait for something gets a line when it may
begin; it ends by itself when its parent is gone.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping

ANSWER_LIMIT = 64 * 1024**2
_LOOK_S = 0.5


class Child:
    """One forked child that answers with one JSON object."""

    def __init__(self, work: Callable[[dict[str, object]], Mapping[str, object]], *, waits: bool = False) -> None:
        """`work` gets the order ({} at once, unless it `waits` for `order`) and returns its answer."""
        self._answer_fd, answer_end = os.pipe()
        order_end, self._order_fd = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent, self._ended = os.getpid(), False
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._answer_fd)
            os.close(self._order_fd)
            _live(work, order_end if waits else None, answer_end, parent)
        os.close(answer_end)
        os.close(order_end)

    def order(self, order: Mapping[str, object]) -> None:
        """Let it begin."""
        try:
            os.write(self._order_fd, json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            return  # it has crashed: `answer` says so

    def answer(self, limit_s: float) -> dict[str, object]:
        """Its answer, or {"problem": ...}, with {"signal": name} when one ended it. It is gone afterwards."""
        data, until, complete = b"", time.monotonic() + limit_s, False
        while (left_s := until - time.monotonic()) > 0 and len(data) < ANSWER_LIMIT:
            if not select.select([self._answer_fd], [], [], left_s)[0]:
                break
            piece = os.read(self._answer_fd, 1 << 16)
            if not piece:
                complete = True
                break
            data += piece
        status = self._end(complete)
        try:
            found = json.loads(data) if complete else None
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        if not complete:
            return {"problem": f"no answer within {limit_s:.0f} s"}
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return {"problem": f"ended by {name}", "signal": name}
        return {"problem": f"ended with code {os.waitstatus_to_exitcode(status)}"}

    def close(self) -> None:
        """End it, if it has not answered."""
        if not self._ended:
            self._end(complete=False)

    def _end(self, complete: bool) -> int:
        self._ended = True
        if not complete:
            os.kill(self._pid, signal.SIGKILL)  # it is ours until waitpid: the number cannot be another's
        _, status = os.waitpid(self._pid, 0)
        os.close(self._answer_fd)
        os.close(self._order_fd)
        return status


def _live(
    work: Callable[[dict[str, object]], Mapping[str, object]], order_fd: int | None, answer_fd: int, parent: int
) -> None:
    """The child's whole life. Never returns."""
    code = 0
    try:
        order = {} if order_fd is None else _wait(order_fd, parent)
        if order is not None:
            answer = json.dumps(_tried(work, order)).encode()
            while answer:
                answer = answer[os.write(answer_fd, answer) :]
    except OSError:
        code = 1  # the parent is gone
    os._exit(code)


def _tried(work: Callable[[dict[str, object]], Mapping[str, object]], order: dict[str, object]) -> Mapping[str, object]:
    try:
        return work(order)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is the answer
        said = str(error).strip().splitlines() or ["no message"]
        return {"problem": f"{type(error).__name__}: {said[0]}"[:300]}


def _wait(order_fd: int, parent: int) -> dict[str, object] | None:
    data = b""
    while not data.endswith(b"\n"):
        if os.getppid() != parent:
            return None
        if select.select([order_fd], [], [], _LOOK_S)[0]:
            piece = os.read(order_fd, 1 << 16)
            if not piece:
                return None
            data += piece
    order = json.loads(data)
    return order if isinstance(order, dict) else None

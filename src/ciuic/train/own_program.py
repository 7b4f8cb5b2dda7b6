"""How a program of the user's own ends when Ciuic refuses something: in words its agent understands."""

import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ciuic.errors import CiuicError, render_error


def tell_errors_plainly() -> None:
    """From now on an uncaught CiuicError prints its traceback, then error, cause and next, and ends with its exit code.

    The agent reads the error line and does not start again what would end the same way. Everything else goes to the
    hook that was there before. Calling this twice changes nothing.
    """
    if not isinstance(sys.excepthook, _PlainErrors):
        sys.excepthook = _PlainErrors(sys.excepthook)


class _PlainErrors:
    """A sys.excepthook in front of another one."""

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, CiuicError):
            self._before(kind, error, trace)
            return
        sys.stderr.write("".join(traceback.format_tb(trace)) + render_error(error) + "\n")
        sys.stderr.flush()
        sys.exit(error.exit_code)

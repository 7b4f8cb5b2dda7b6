"""A short program of ours in a process of its own, asked for one JSON object."""

import contextlib
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

ANSWER_LIMIT = 65536
"""Characters of an answer, unless the caller says more."""
_POLL_S = 0.1
_log = logging.getLogger(__name__)


def installed_version(package: str) -> str:
    """The installed version of a package, without importing it; empty when it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def ask_child(
    module: str,
    *arguments: str,
    limit_s: float,
    keep_going: Callable[[], bool] = lambda: True,
    more: dict[str, str] | None = None,
    question: str = "",
    answer_limit: int = ANSWER_LIMIT,
) -> dict[str, object]:
    """What `python -m module` prints (one JSON object). Without an answer: {"problem": its last line, or the reason}.

    It reads `question` on its standard input, is killed after `limit_s`, and as soon as `keep_going` says no. `more`
    goes into its environment.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if question else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(more or {})},
            text=True,
            errors="replace",
        )
    except OSError as error:
        return {"problem": str(error)}
    until, text, said, given = time.monotonic() + limit_s, "", "", question or None
    while True:
        try:
            text, said = child.communicate(given, timeout=_POLL_S)
            break
        except subprocess.TimeoutExpired:
            given = None  # communicate keeps what it has not written yet
            if keep_going() and time.monotonic() < until:
                continue
            child.kill()
            child.communicate()
            return {"problem": f"no answer within {limit_s:.0f} s"}
    try:
        answer = json.loads(text[-answer_limit:])
    except ValueError:
        last = (said.strip().splitlines() or [f"{_ending(child.returncode)} and said nothing"])[-1]
        _log.info("%s: %s", module, last[:300])
        return {"problem": last[:300]}
    return answer if isinstance(answer, dict) else {"problem": "it did not print an object"}


def _ending(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with code {code}"

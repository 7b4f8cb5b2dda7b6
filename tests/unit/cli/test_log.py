"""Log lines of the hub and the agent, as a program of its own writes them."""

import subprocess
import sys

from support.cli_world import program_environment

PROGRAM = """
import logging, structlog
from ciuic.cli.log import log_to_stderr
log_to_stderr()
"""


def stderr_of(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM + code],
        env=program_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_both_kinds_of_loggers_write_the_same_kind_of_line() -> None:
    lines = stderr_of(
        "logging.getLogger('ciuic.node').info('node %s speaks', 'us-west')\n"
        "structlog.get_logger('ciuic.hub').warning('push refused', node='us-west')\n"
        "structlog.get_logger('ciuic.hub').debug('not shown')\n"
    )
    assert [line[9:] for line in lines] == ["node us-west speaks", "warning: push refused node=us-west"]
    assert all(line[2] == line[5] == ":" for line in lines)


def test_an_exception_keeps_its_lines() -> None:
    lines = stderr_of("try: 1 / 0\nexcept ZeroDivisionError: structlog.get_logger().exception('it failed')\n")
    assert lines[0][9:] == "error: it failed"
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_control_characters_from_other_machines_are_not_shown() -> None:
    (line,) = stderr_of("logging.getLogger('ciuic').info('bad \\x1b]0;title\\x07 text')\n")
    assert line.isprintable()

"""`python -m ciuic.doctor.collect FOLDER`: a collector as a process of its own, for `watch`.

Prints its address as `host:port` on the first line of stdout and takes its token from the environment. It tells what it
finds on stderr, and ends when all ranks have left, or when its standard input ends before any has come.
"""

import os
import select
import sys
import time
from pathlib import Path

from ciuic.doctor.collector import Collector, Options
from ciuic.doctor.environment import EVERY, EVERY_DEFAULT, TOKEN
from ciuic.doctor.finding import Incident
from ciuic.doctor.report.page import try_to_write
from ciuic.doctor.report.text import incident_lines

POLL_S = 0.2
LINGER_S = 2.0
"""After the last rank has left: another may still connect."""


def _tell(incident: Incident) -> None:
    for line in incident_lines(incident):
        sys.stderr.write(f"doctor: {line}\n")
    sys.stderr.flush()


def _wait(collector: Collector) -> None:
    """Until nobody is left who could report."""
    idle_since_s: float | None = None
    while idle_since_s is None or time.monotonic() - idle_since_s < LINGER_S:
        time.sleep(POLL_S)
        case = collector.case
        if case.hellos and not case.present():
            idle_since_s = idle_since_s or time.monotonic()
            continue
        idle_since_s = None
        readable, _, _ = select.select([sys.stdin], [], [], 0)
        if readable and not case.hellos and not sys.stdin.readline():
            return


def main(arguments: list[str]) -> int:
    """The exit code."""
    host = arguments[1] if len(arguments) > 1 else "127.0.0.1"
    every = int(os.environ.get(EVERY) or EVERY_DEFAULT)
    options = Options(folder=Path(arguments[0]), host=host, token=os.environ.get(TOKEN, ""), every=every)
    collector = Collector(options, told=_tell)
    address = collector.start()
    sys.stdout.write(f"{address[0]}:{address[1]}\n")
    sys.stdout.flush()
    _wait(collector)
    collector.close()
    try_to_write(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

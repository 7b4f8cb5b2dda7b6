"""A training process: `python -m ciuic.train.worker --run-file PATH`, started by the node's agent."""

import argparse
import logging
import os
import sys
from pathlib import Path

from ciuic.errors import CiuicError, UsageError, render_error
from ciuic.train.joining import begin_approach
from ciuic.train.runfile import DRAINED, RunFile, read_run_file


def main() -> int:
    """Train the run to its end. The exit code is the error's, 0 when the run is complete, DRAINED after a SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m ciuic.train.worker", description=__doc__)
    parser.add_argument("--run-file", type=Path, required=True)
    path: Path = parser.parse_args().run_file
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    os.environ["CIUIC_RUN_FILE"] = str(path)
    try:
        info = read_run_file(path)
        if info.job.model.command:
            _become(info.job.model.command)
        return _train(info)
    except CiuicError as error:
        sys.stderr.write(render_error(error) + "\n")
        return error.exit_code


def _become(command: list[str]) -> None:
    """The job's own program takes this process's place; `ciuic.join()` finds the run in its environment."""
    program = [sys.executable if command[0] == "python" else command[0], *command[1:]]
    try:
        os.execvp(program[0], program)
    except OSError as error:
        raise UsageError(
            f"the job's program {program[0]} cannot be started on this node",
            cause=error.strerror or str(error),
            next="correct [model] command in the job; it must be on the PATH of the node's agent",
        ) from error


def _train(info: RunFile) -> int:
    approach = begin_approach(info)  # before torch is imported
    from ciuic.train.session import Run
    from ciuic.train.trainer import train

    run = Run(info, approach)
    try:
        train(run)
    except BaseException as error:  # also SystemExit: the hub is told, leases go back; then it goes on up
        run.close(error)
        raise
    run.close()
    return DRAINED if run.drained else 0


if __name__ == "__main__":
    sys.exit(main())

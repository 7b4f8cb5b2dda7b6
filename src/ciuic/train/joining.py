"""`ciuic.join()`: this process's place in the run that its agent started."""

import os
from typing import TYPE_CHECKING

from ciuic.train.approach import Approach
from ciuic.train.own_program import tell_errors_plainly
from ciuic.train.runfile import RunFile, read_run_file

if TYPE_CHECKING:
    from ciuic.train.session import Run


def join() -> "Run":
    """This process's place in the run that its agent started. Raises NotInRunError elsewhere.

    Call it before the model is built: what a joiner must fetch comes meanwhile. From then on a CiuicError that the
    program does not catch is told as error, cause and next, with its exit code, and torch.distributed knows ciuic://.
    """
    tell_errors_plainly()
    info = read_run_file()
    approach = begin_approach(info)
    from ciuic.train import rendezvous
    from ciuic.train.session import Run

    rendezvous.register()
    return Run(info, approach)


def begin_approach(info: RunFile) -> Approach:
    """Begun on the rank that speaks for its node, before anything slow is imported."""
    approach = Approach(info)
    if info.ranks <= 1 or os.environ.get("RANK", "0") == "0":
        approach.begin()
    return approach

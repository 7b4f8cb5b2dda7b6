"""How a program ends that Ciuic refused: its exit code and its last words."""

import subprocess
import sys
from pathlib import Path

import pytest

import ciuic
from ciuic.errors import TrainingLoopError, UsageError
from ciuic.train.worker import _become

PROGRAM = """
import sys
sys.path.insert(0, {source!r})
from ciuic.errors import TrainingLoopError
from ciuic.train.own_program import tell_errors_plainly
sys.excepthook = lambda kind, error, trace: print("the hook before:", error, file=sys.stderr)
tell_errors_plainly(), tell_errors_plainly()
def refused():
    raise {error}
refused()
"""


def end(error: str) -> tuple[int, str]:
    program = PROGRAM.format(source=str(Path(ciuic.__file__).parents[1]), error=error)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_our_error_says_where_and_what_and_ends_with_its_code() -> None:
    code, said = end('TrainingLoopError("no loop", cause="there is none", next="write one")')
    assert code == TrainingLoopError.exit_code == 2
    assert "line 9, in refused" in said
    assert said.endswith("error[CIUIC-104]: no loop\ncause: there is none\nnext: write one\n")
    assert said.count("error[") == 1


def test_other_errors_go_to_the_hook_that_was_there() -> None:
    assert end('ValueError("mine")') == (1, "the hook before: mine\n")


def test_a_program_that_this_node_does_not_have_is_named() -> None:
    with pytest.raises(UsageError, match="no-such-program cannot be started") as caught:
        _become(["no-such-program", "--fast"])
    assert "PATH" in caught.value.next

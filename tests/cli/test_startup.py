"""`ciuic --help` is quick and loads nothing that it does not need."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli_world import command, program, program_environment

from ciuic.cli.main import COMMANDS

ROUNDS = 7
FORBIDDEN = {"torch", "transformers", "datasets", "numpy", "pydantic_core", "starlette", "uvicorn", "cryptography"}
GROUPS = [("hub", "start"), ("hub", "status"), ("hub", "token", "create"), ("node", "join"), ("node", "check")]
EVERY_COMMAND = [(name,) for name in COMMANDS] + [*GROUPS, ("node", "leave"), ("hub", "token")]


def seconds(arguments: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(arguments, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=60)
    return time.perf_counter() - began


@pytest.mark.alone
def test_help_answers_within_three_times_the_import_of_typer_and_rich(tmp_path: Path) -> None:
    """Interleaved, the best of several each, with byte code written for both as in any installed package."""
    environment = program_environment(PYTHONPYCACHEPREFIX=str(tmp_path))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    ours, theirs = command("--help"), [sys.executable, "-P", "-c", "import typer, rich"]
    times = [(seconds(ours, environment), seconds(theirs, environment)) for _ in range(ROUNDS)]
    help_s, import_s = min(pair[0] for pair in times), min(pair[1] for pair in times)
    assert help_s <= 3 * import_s, f"help {help_s:.3f} s, import typer, rich {import_s:.3f} s"


def test_help_imports_no_torch_and_nothing_heavy() -> None:
    code = (
        "import sys; from ciuic.cli.main import main; main(['--help']); "
        f"print('loaded', sorted({FORBIDDEN} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=program_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded []"


@pytest.mark.parametrize("words", EVERY_COMMAND, ids=" ".join)
def test_every_command_explains_itself(words: tuple[str, ...]) -> None:
    done = program(*words, "--help", environment=program_environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: ciuic {' '.join(words)}")
    assert len(done.stdout.splitlines()) > 3


def test_help_lists_the_commands_in_reading_order() -> None:
    text = program("-h", environment=program_environment()).stdout
    listed = [line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == list(COMMANDS)


def test_the_program_alone_shows_its_help() -> None:
    done = program(environment=program_environment())
    assert done.returncode == 0
    assert "Usage: ciuic" in done.stdout


def test_the_shell_completes_commands() -> None:
    environment = program_environment(
        _CIUIC_COMPLETE="complete_bash", COMP_WORDS="ciuic st", COMP_CWORD="1", PATH=os.environ["PATH"]
    )
    assert program(environment=environment).stdout.split() == ["status", "stop"]

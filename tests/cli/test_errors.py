"""How a failure looks: three lines for a person, one object for a program, and an exit code."""

import json
from pathlib import Path

import pytest
from support.cli_world import CliWorld, ciuic, program_environment

from ciuic.cli import main as program
from ciuic.errors import ConflictError, RoleError, all_error_classes


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without any hub."""
    return program_environment(CIUIC_HOME=str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("words", "message", "next_"),
    [
        (("lgs",), "no such command 'lgs'; did you mean 'logs'?", "`ciuic --help` shows what there is"),
        (("hub", "token", "crate"), "no such command 'crate'; did you mean 'create'?", "`ciuic hub token --help`"),
        (("ps", "--jsn"), "no such option: --jsn; did you mean --json?", "`ciuic ps --help`"),
        (("run",), "missing argument 'JOB.toml'", "`ciuic run --help`"),
        (("hub",), "missing command", "`ciuic hub --help`"),
        (("hub", "start", "--port", "x"), "invalid value for '--port'", "`ciuic hub start --help`"),
        (("node", "join", "https://h:1", "--location", "a", "--claim", "gpu"), "'gpu' is not a claim", "--claim gpu=8"),
        (("hub", "token", "create", "--lifetime", "soon"), "'soon' is not a duration", "write for example 30 s"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_command_line_says_what_and_what_next(
    words: tuple[str, ...], message: str, next_: str, nowhere: dict[str, str]
) -> None:
    done = ciuic(*words, environment=nowhere)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[0].startswith("error[CIUIC-100]: ")
    assert message in done.stderr
    assert next_ in done.stderr.splitlines()[-1]


def test_without_a_profile_the_three_lines_say_where_to_get_one(nowhere: dict[str, str]) -> None:
    done = ciuic("ps", environment=nowhere)
    assert done.returncode == 3
    error, cause, next_ = done.stderr.splitlines()
    assert error == "error[CIUIC-202]: this machine has no operator certificate"
    assert cause.startswith("cause: there is no ")
    assert next_.startswith("next: run this where `ciuic hub start` was run")


def test_with_json_an_error_is_the_only_thing_on_stdout(nowhere: dict[str, str]) -> None:
    done = ciuic("ps", "--json", environment=nowhere)
    assert done.returncode == 3
    assert done.stderr == ""
    error = json.loads(done.stdout)["error"]
    assert set(error) == {"code", "message", "cause", "next"}
    assert error["code"] == "CIUIC-202"


def test_with_json_a_wrong_command_line_is_json_too(nowhere: dict[str, str]) -> None:
    done = ciuic("pss", "--json", environment=nowhere)
    assert json.loads(done.stdout)["error"]["code"] == "CIUIC-100"
    assert done.returncode == 2


def test_a_bad_job_file_shows_every_problem(tmp_path: Path, nowhere: dict[str, str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[sync]\nintervall = 1\npolicy = 3\n")
    done = ciuic("run", str(path), environment=nowhere)
    assert done.returncode == 2
    assert done.stderr.splitlines()[:3] == [
        f"error[CIUIC-101]: {path} has 2 problems",
        "  line 2: unknown key intervall in [sync]; did you mean interval?",
        "  line 3: sync.policy must be 'sync' or 'async', not 3",
    ]
    body = json.loads(ciuic("run", str(path), "--json", environment=nowhere).stdout)
    assert len(body["error"]["problems"]) == 2


def test_an_error_of_the_hub_keeps_its_code_and_exit_code(tmp_path: Path) -> None:
    world = CliWorld(tmp_path)
    try:
        world.on("POST", "/v1/runs/r1/stop", RoleError("viewers may not stop runs", next="ask the operator"))
        done = world.ciuic("stop", "r1")
        assert done.returncode == 3
        assert done.stderr == "error[CIUIC-203]: viewers may not stop runs\nnext: ask the operator\n"
        world.on("POST", "/v1/runs/r1/resume", ConflictError("r1 is running"))
        assert world.ciuic("resume", "r1").returncode == 5
    finally:
        world.close()


def test_a_hub_that_does_not_answer_is_exit_code_4(tmp_path: Path) -> None:
    world = CliWorld(tmp_path)
    world.close()
    done = world.ciuic("nodes")
    assert done.returncode == 4
    assert "error[CIUIC-300]" in done.stderr


def test_a_damaged_profile_is_explained(tmp_path: Path) -> None:
    profile = tmp_path / "operator" / "profile.json"
    profile.parent.mkdir()
    environment = program_environment(CIUIC_HOME=str(tmp_path))
    for text, cause in (("{", "is not a profile"), ('{"url": "x"}', "must hold url, authority, cert, key")):
        profile.write_text(text)
        done = ciuic("ps", environment=environment)
        assert done.returncode == 2
        assert cause in done.stderr
    profile.write_text('{"url": "https://h:1", "authority": "a.pem", "cert": "c.pem", "key": "k"}')
    done = ciuic("ps", environment=environment)
    assert done.returncode == 3
    assert "a.pem, which is not there" in done.stderr


def test_every_error_class_has_an_exit_code_that_the_program_documents() -> None:
    documented = program.__doc__ or ""
    codes = {kind.exit_code for kind in all_error_classes()}
    assert codes == {1, 2, 3, 4, 5, 6, 7}
    assert all(f"{code} " in documented for code in codes)

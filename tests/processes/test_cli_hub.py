"""`ciuic hub start` as a real process, and the operator's commands beside it."""

import json
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cli_world import Done, command, program, program_environment


@dataclass(frozen=True, kw_only=True)
class RunningHub:
    process: subprocess.Popen[str]
    url: str
    home: Path

    def ciuic(self, *arguments: str) -> Done:
        return program(*arguments, environment=program_environment(CIUIC_HOME=str(self.home)))


def start(home: Path) -> RunningHub:
    arguments = command("hub", "start", "--host", "127.0.0.1", "--port", "0", "--name", "hub.example")
    process = subprocess.Popen(
        arguments,
        env=program_environment(CIUIC_HOME=str(home)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    found = re.match(r"hub ready at https://hub\.example:(\d+)  authority [0-9a-f]{16}", ready)
    if found is None:
        process.kill()
        raise AssertionError(f"not ready: {ready!r} {process.communicate()[1]}")
    return RunningHub(process=process, url=f"https://127.0.0.1:{found[1]}", home=home)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[RunningHub]:
    hub = start(tmp_path / "home")
    yield hub
    hub.process.kill()
    hub.process.communicate(timeout=30)


def test_the_first_start_makes_the_operator_of_this_machine(hub: RunningHub) -> None:
    operator = hub.home / "operator"
    assert json.loads((operator / "profile.json").read_text())["url"] == hub.url
    assert stat.S_IMODE(operator.stat().st_mode) == 0o700
    assert stat.S_IMODE((operator / "operator.key").stat().st_mode) == 0o600
    info = json.loads(hub.ciuic("hub", "status", "--json").stdout)
    assert info["nodes"] == []
    assert "no nodes yet" in hub.ciuic("hub", "status").stdout


def test_a_token_of_the_command_is_one_that_a_machine_can_join_with(hub: RunningHub, tmp_path: Path) -> None:
    token = hub.ciuic("hub", "token", "create", "--lifetime", "5 min")
    assert token.returncode == 0, token.stderr
    environment = program_environment(CIUIC_HOME=str(tmp_path / "node"), CIUIC_TOKEN=token.stdout.strip())
    agent = subprocess.Popen(
        command("node", "join", hub.url, "--location", "us-west"), env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        events = subprocess.Popen(
            command("events", "--follow", "--json"),
            env=program_environment(CIUIC_HOME=str(hub.home)),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert events.stdout is not None
        kinds = (json.loads(line)["kind"] for line in events.stdout)
        assert "node.joined" in kinds  # reads the stream until it comes
        events.kill()
        events.communicate(timeout=30)
        assert [node["node_id"] for node in json.loads(hub.ciuic("nodes", "--json").stdout)] == ["us-west"]
        agent.send_signal(signal.SIGTERM)
        agent.communicate(timeout=60)
        assert agent.returncode == 0
    finally:
        agent.kill()
        agent.communicate(timeout=30)


def test_ctrl_c_ends_the_hub_without_an_error(hub: RunningHub) -> None:
    hub.process.send_signal(signal.SIGINT)
    _, stderr = hub.process.communicate(timeout=30)
    assert hub.process.returncode == 0
    assert "Traceback" not in stderr


def test_a_second_hub_in_the_same_home_is_refused(hub: RunningHub) -> None:
    done = hub.ciuic("hub", "start", "--host", "127.0.0.1", "--port", "0")
    assert done.returncode == 5
    assert "another hub is running" in done.stderr


def test_a_used_port_is_named_with_the_way_out(hub: RunningHub, tmp_path: Path) -> None:
    port = hub.url.rpartition(":")[2]
    done = program(
        "hub", "start", "--host", "127.0.0.1", "--port", port,
        environment=program_environment(CIUIC_HOME=str(tmp_path / "other")),
    )  # fmt: skip
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr


def test_unknown_names_are_refused_with_their_code(hub: RunningHub) -> None:
    for arguments in (("status", "nothing"), ("stop", "nothing"), ("logs", "nothing")):
        done = hub.ciuic(*arguments)
        assert (done.returncode, done.stderr[:17]) == (5, "error[CIUIC-406]:"), done.stderr

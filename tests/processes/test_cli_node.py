"""`ciuic node join` and `ciuic node leave` as real processes beside a small hub."""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_world import Done, command, program, program_environment
from support.net_server import SmallHub

JOIN = ("--location", "us-west", "--claim", "gpu=8")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    hub = SmallHub(tmp_path / "hub").start()
    yield hub
    hub.stop()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return program_environment(CIUIC_HOME=str(tmp_path / "home"))


def start_agent(hub: SmallHub, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("node", "join", hub.url, *JOIN),
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def leave(environment: dict[str, str], *more: str) -> Done:
    return program("node", "leave", *more, environment=environment)


def test_a_node_joins_with_a_token_from_the_environment_and_leaves_on_command(
    hub: SmallHub, environment: dict[str, str]
) -> None:
    agent = start_agent(hub, {**environment, "CIUIC_TOKEN": hub.token()})
    try:
        beat = hub.wait_for_beat(lambda beat: True, "the agent's first beat")
        assert beat.claimed == {"gpu": 8.0}
        done = leave(environment)
        assert (done.returncode, done.stdout) == (0, "us-west has left\n"), done.stderr
        _, stderr = agent.communicate(timeout=30)
    finally:
        agent.kill()
    assert agent.returncode == 0
    assert hub.left == ["us-west"]
    assert re.search(r"^\d\d:\d\d:\d\d node us-west has left$", stderr, re.MULTILINE)
    assert "ciuic1." not in stderr


def test_a_node_whose_agent_is_gone_leaves_by_itself(hub: SmallHub, environment: dict[str, str]) -> None:
    agent = start_agent(hub, {**environment, "CIUIC_TOKEN": hub.token()})
    hub.wait_for_beat(lambda beat: True, "the agent's first beat")
    agent.send_signal(signal.SIGKILL)
    agent.communicate(timeout=30)
    done = leave(environment, "--location", "us-west", "--json")
    assert done.returncode == 0, done.stderr
    assert hub.left == ["us-west"]


def test_joining_without_a_token_says_where_to_get_one(hub: SmallHub, environment: dict[str, str]) -> None:
    done = program("node", "join", hub.url, *JOIN, environment=environment)
    assert done.returncode == 3
    assert "error[CIUIC-201]" in done.stderr
    assert "ciuic hub token create" in done.stderr


def test_a_wrong_token_is_refused_in_three_lines(hub: SmallHub, environment: dict[str, str]) -> None:
    done = program("node", "join", hub.url, *JOIN, environment={**environment, "CIUIC_TOKEN": "ciuic1.xyz"})
    assert done.returncode == 3
    assert done.stderr.startswith("error[CIUIC-201]: ")
    assert "Traceback" not in done.stderr

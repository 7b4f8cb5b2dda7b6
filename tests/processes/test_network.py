"""CiuicNodeNetwork on a real hub with a real agent."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_process import HubProcess, eventually
from net_processes import SOURCES, AgentProcess

import ciuic
from ciuic.errors import ConflictError, NotFoundError, RunFailedError, UnreachableError


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def network(hub: HubProcess) -> Iterator[ciuic.CiuicNodeNetwork]:
    network = ciuic.CiuicNodeNetwork(hub.home)
    yield network
    network.close()


def test_from_a_claim_to_a_run_on_the_measured_node(
    hub: HubProcess, network: ciuic.CiuicNodeNetwork, tmp_path: Path
) -> None:
    expected = network.add_node("us-west", {"gpu": 8, "bandwidth": 10})
    assert expected["status"] == "expected"
    assert expected.join_command.startswith(f"ciuic node join {hub.url} --location us-west --claim gpu=8")
    assert network.add_node("us-west", {"gpu": 8, "bandwidth": 10}).token == expected.token, "one token is enough"
    with pytest.raises(UnreachableError, match="no node from us-west"):
        network.wait_for("us-west", timeout_s=0.0)
    agent = AgentProcess(hub, tmp_path / "node", token=expected.token, settle_s=0.0, claimed=expected.specs)
    try:
        node = network.wait_for("us-west", timeout_s=60.0)
        assert node["gpu_capacity"] == 8.0
        measured = network.measure()["us-west"]
        assert measured["up_bits_per_s"] > 0
        assert network.data_planes["us-west"].streams == int(measured["up_streams"])
        run = network.schedule_training({"name": "loop"}, requirements={"cpus": 1})
        eventually(lambda: run.nodes == ["us-west"], within_s=60.0)
        info = run.status()
        assert info.job["nodes"] == {
            "min": 1, "locations": ["us-west"], "require": {"cpus": 1}, "ranks": 1, "sharding": "none",
            "replace": "spare",
        }  # fmt: skip
        with pytest.raises(ConflictError, match="not over"):
            run.wait(timeout_s=0.0)
        run.stop()
        with pytest.raises(RunFailedError, match="was stopped"):
            run.wait(timeout_s=60.0)
        greedy = network.schedule_training("deepseek-v3-tiny", requirements={"gpus": 64}, min_nodes=1)
        eventually(lambda: "gpus must be 64" in greedy.status().reason)
    finally:
        agent.close()


def test_an_empty_network_measures_nothing_and_says_so(network: ciuic.CiuicNodeNetwork) -> None:
    assert network.nodes == {}
    with pytest.raises(ConflictError, match="no node is here"):
        network.measure()
    with pytest.raises(NotFoundError, match="mars"):
        network.measure("mars")
    run = network.schedule_training("deepseek-v3-tiny")
    assert run.status().state == "waiting"


def test_the_class_loads_no_torch() -> None:
    program = "import sys; from ciuic import CiuicNodeNetwork; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"

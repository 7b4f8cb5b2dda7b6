"""The agent and the real hub, each a process, with a stand-in worker: the whole control plane."""

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hub_process import HubProcess, eventually
from net_processes import AgentProcess, is_alive

from ciuic.net.messages import LogLine, Ok


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(tmp_path / "home", grace_s=5.0) as started:
        yield started


@pytest.fixture
def agent(hub: HubProcess, tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess(hub, tmp_path / "node", token=hub.token(), claimed={"gpu": 8.0})
    eventually(lambda: "us-west" in (nodes := hub.nodes()) and nodes["us-west"].facts)  # its first heartbeat
    yield process
    process.close()


def _state(hub: HubProcess) -> str:
    node = hub.nodes().get("us-west")
    return node.state if node else ""


def _lines(hub: HubProcess, run_id: str) -> list[LogLine]:
    class Sent(LogLine, kw_only=True, frozen=True):
        id: int
        node_id: str

    stream = hub.operator().stream_lines(f"/v1/runs/{run_id}/logs?after=0&follow=0")
    return [msgspec.json.decode(line, type=Sent) for line in stream]


def test_measured_values_stand_beside_claimed_ones(hub: HubProcess, agent: AgentProcess) -> None:
    eventually(lambda: "up_bits_per_s" in hub.nodes()["us-west"].measured)
    node = hub.nodes()["us-west"]
    assert node.claimed == {"gpu": 8.0}
    assert node.measured["down_bits_per_s"] > 0
    assert abs(node.measured["clock_offset_s"]) < 2
    assert node.facts["host"]


def test_a_stopped_run_stops_its_worker_gently_and_its_words_are_kept(hub: HubProcess, agent: AgentProcess) -> None:
    run_id = hub.submit({"name": "loop"})
    eventually(lambda: any(line.text == "armed" for line in _lines(hub, run_id)))
    assert hub.nodes()["us-west"].worker.state == "running"
    hub.operator().call("POST", f"/v1/runs/{run_id}/stop", None, Ok)
    eventually(lambda: hub.run(run_id).state == "stopped")
    eventually(lambda: any(line.text == "drained" for line in _lines(hub, run_id)))
    assert {line.rank for line in _lines(hub, run_id) if line.stream == "out"} == {0}
    hub.operator().call("POST", f"/v1/runs/{run_id}/resume", None, Ok)
    eventually(lambda: any(line.text.endswith("attempt 2 rank 0 ready") for line in _lines(hub, run_id)))


def test_a_run_whose_worker_fails_ends_with_the_exception_line(hub: HubProcess, agent: AgentProcess) -> None:
    run_id = hub.submit({"name": "fail", "fault": {"restarts": 0}})
    eventually(lambda: hub.run(run_id).state == "failed")
    assert "ValueError: no such luck" in hub.run(run_id).reason


def test_a_hub_killed_and_restarted_finds_the_same_worker(hub: HubProcess, agent: AgentProcess) -> None:
    run_id = hub.submit({"name": "loop"})
    eventually(lambda: any(line.text == "armed" for line in _lines(hub, run_id)))
    pids = agent.pids(run_id)
    hub.kill()
    hub.start()
    eventually(lambda: _state(hub) == "training")
    assert agent.pids(run_id) == pids
    assert is_alive(pids[0])
    eventually(lambda: "the hub is back" in agent.said())


def test_a_node_leaves_and_comes_back_with_its_identity(hub: HubProcess, agent: AgentProcess, tmp_path: Path) -> None:
    agent.send(signal.SIGTERM)
    assert agent.wait() == 0
    assert _state(hub) == "left"
    again = AgentProcess(hub, tmp_path / "node")
    eventually(lambda: _state(hub) == "idle")
    assert list(hub.nodes()) == ["us-west"]
    again.close()


def test_an_evicted_node_stops_and_needs_a_new_token(hub: HubProcess, agent: AgentProcess, tmp_path: Path) -> None:
    hub.operator().call("POST", "/v1/nodes/us-west/evict", None, Ok)
    assert agent.wait() == 3
    assert "evicted" in agent.said()
    refused = AgentProcess(hub, tmp_path / "node")
    assert refused.wait() == 3
    again = AgentProcess(hub, tmp_path / "node", token=hub.token())
    eventually(lambda: any(node.state == "idle" for node in hub.nodes().values()))
    again.close()

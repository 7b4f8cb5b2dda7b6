"""Real agents on a real hub: measured once joined, again when asked, carefully while they work; drained and back."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_process import HubProcess, eventually
from net_processes import AgentProcess

from ciuic.cli.measuring import measure_nodes
from ciuic.errors import ConflictError, NotFoundError
from ciuic.net.messages import MeasureReply, NodeInfo
from ciuic.node.measurements import load_measurements

WHOLE = {
    "up_bits_per_s",
    "up_1_stream_bits_per_s",
    "up_streams",
    "down_bits_per_s",
    "down_streams",
    "rtt_s",
    "clock_offset_s",
    "cpu_flops",
    "cpu_count",
    "memory_free_bytes",
    "disk_free_bytes",
    "disk_write_bytes_per_s",
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(tmp_path / "hub") as hub:
        yield hub


def start(hub: HubProcess, tmp_path: Path, **options: object) -> AgentProcess:
    return AgentProcess(hub, tmp_path / "node", token=hub.token(), settle_s=0.0, **options)


def node(hub: HubProcess) -> NodeInfo:
    return hub.nodes()["us-west"]


def measured(hub: HubProcess) -> NodeInfo | None:
    """The node, once everything is measured."""
    found = hub.nodes().get("us-west")
    return found if found is not None and found.measured.keys() >= WHOLE else None


def test_a_node_is_measured_once_it_has_joined_and_again_when_an_operator_asks(hub: HubProcess, tmp_path: Path) -> None:
    agent = start(hub, tmp_path, claimed={"gpu": 8.0})
    try:
        first = eventually(lambda: measured(hub), within_s=120.0)
        assert first.claimed == {"gpu": 8.0}
        assert first.measured_at is not None
        assert 1 <= first.measured["up_streams"] <= 16
        assert 0 <= first.measured.get("loss_share", 0.0) <= 1
        assert load_measurements(agent.folder).is_complete
        outcome = measure_nodes(hub.operator(), ["us-west"], limit_s=120.0)
        assert (outcome.exit_code, outcome.remarks) == (0, [])
        assert (outcome.nodes[0].measured_at or 0.0) > first.measured_at
        assert outcome.nodes[0].measure_ticket > 0
    finally:
        agent.close()
    assert "torch" not in agent.said()


def test_a_restarted_agent_tells_what_it_knew_with_its_age_and_does_not_measure_again(
    hub: HubProcess, tmp_path: Path
) -> None:
    agent = start(hub, tmp_path)
    first = eventually(lambda: measured(hub), within_s=120.0)
    agent.send(signal.SIGTERM)
    assert agent.wait() == 0
    hub.kill()
    hub.start()
    agent = AgentProcess(hub, tmp_path / "node", settle_s=0.0)
    try:
        eventually(lambda: node(hub).state == "idle" and hub.nodes()["us-west"].last_seen_s is not None)
        again = node(hub)
        assert again.measured["up_bits_per_s"] == first.measured["up_bits_per_s"]
        assert again.measured_at == pytest.approx(first.measured_at, abs=2.0)
        assert "measuring this node" not in agent.said()
    finally:
        agent.close()


def test_a_node_that_works_measures_only_what_does_not_disturb(hub: HubProcess, tmp_path: Path) -> None:
    run_id = hub.submit({"name": "loop"})
    agent = start(hub, tmp_path)
    try:
        eventually(lambda: hub.nodes().get("us-west") and node(hub).worker.state == "running", within_s=60.0)
        basics = eventually(lambda: node(hub).measured.get("up_bits_per_s"), within_s=60.0)
        outcome = measure_nodes(hub.operator(), ["us-west"], limit_s=60.0)
        assert outcome.exit_code == 0
        assert outcome.remarks == ["us-west works: only its round trip and what is free were measured now"]
        assert node(hub).measured["up_bits_per_s"] == basics
        assert "cpu_flops" not in node(hub).measured
        assert node(hub).run_id == run_id
    finally:
        agent.close()


def test_a_job_that_requires_more_than_was_measured_waits_and_says_why(hub: HubProcess, tmp_path: Path) -> None:
    modest = hub.submit({"name": "loop", "nodes": {"require": {"cpus": 1, "up_mbit": 0.1, "max_rtt_ms": 60_000}}})
    greedy = hub.submit({"name": "loop", "nodes": {"require": {"gpus": 64}}})
    agent = start(hub, tmp_path, claimed={"gpu": 64.0})
    try:
        eventually(lambda: node(hub).run_id == modest if hub.nodes() else None, within_s=60.0)
        assert hub.run(greedy).state == "waiting"
        eventually(lambda: "busy with" in hub.run(greedy).reason)
        hub.operator().call("POST", f"/v1/runs/{modest}/stop", None, dict[str, bool])
        eventually(lambda: "gpus must be 64, measured " in hub.run(greedy).reason, within_s=60.0)
    finally:
        agent.close()


def test_a_drained_node_finishes_pushes_stays_and_takes_work_again(hub: HubProcess, tmp_path: Path) -> None:
    agent = start(hub, tmp_path)
    try:
        run_id = hub.submit({"name": "loop"})
        eventually(lambda: hub.nodes().get("us-west") and node(hub).worker.state == "running", within_s=60.0)
        holder = int((agent.folder / "lock").read_text())
        os.kill(holder, signal.SIGUSR1)
        eventually(lambda: node(hub).state == "draining" and not node(hub).run_id, within_s=60.0)
        assert hub.run(run_id).state == "running"
        assert agent.process.poll() is None
        kinds = [event.kind for event in hub.events()]
        assert "node.draining" in kinds
        assert "node.left" not in kinds
        os.kill(holder, signal.SIGUSR2)
        eventually(lambda: node(hub).run_id == run_id, within_s=60.0)
    finally:
        agent.close()


def test_what_cannot_be_measured_is_refused(hub: HubProcess, tmp_path: Path) -> None:
    client = hub.operator()
    with pytest.raises(NotFoundError):
        client.call("POST", "/v1/nodes/nobody/measure", None, MeasureReply)
    with pytest.raises(NotFoundError, match="nobody"):
        measure_nodes(client, ["nobody"], limit_s=1.0)
    with pytest.raises(ConflictError, match="no node is here"):
        measure_nodes(client, [], limit_s=1.0)
    wire = hub.join("us-west")
    wire.beat()
    outcome = measure_nodes(client, [], limit_s=0.0)
    assert outcome.missing == ["us-west"]
    assert outcome.exit_code == 7
    assert json.dumps(outcome.remarks) == '["us-west has not answered within 0 s"]'

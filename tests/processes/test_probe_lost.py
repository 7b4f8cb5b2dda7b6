"""A link that cannot be measured keeps nobody out."""

import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from net_processes import AgentProcess
from net_server import SmallHub, cut

from ciuic.net.messages import Assignment


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    hub = SmallHub(tmp_path / "hub").start()
    yield hub
    hub.stop()


def test_an_agent_whose_probes_are_all_cut_joins_works_and_leaves(hub: SmallHub, tmp_path: Path) -> None:
    def misbehave(handler: BaseHTTPRequestHandler) -> bool:
        if "/v1/node/probe" not in handler.path:
            return False
        cut(handler.connection)
        handler.close_connection = True
        return True

    hub.misbehave = misbehave
    agent = AgentProcess(hub, tmp_path / "node", token=hub.token(), settle_s=0.0)
    try:
        hub.wait_for(lambda: any("probe" in path for _, path in hub.requests), "a probe")
        beat = hub.wait_for_beat(lambda beat: "cpu_count" in beat.measured, "what the machine has")
        assert "up_bits_per_s" not in beat.measured
        assert beat.measured_age_s is None
        hub.assign(Assignment(run_id="run-1", job={"name": "loop"}))
        hub.wait_for_beat(lambda beat: beat.worker.state == "running", "a worker")
        agent.send(signal.SIGTERM)
        assert agent.wait() == 0
    finally:
        agent.close()
    assert "cannot be measured now" in agent.said()

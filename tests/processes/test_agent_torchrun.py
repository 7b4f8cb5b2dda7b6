"""Several ranks: the agent starts torchrun, knows who said what, and ends all of it."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_processes import AgentProcess, is_alive, wait_until
from net_server import SmallHub

from ciuic.net.messages import Assignment

TORCHRUN_S = 120.0
"""Importing torch alone takes long on a busy machine."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    server = SmallHub(tmp_path / "hub").start()
    yield server
    server.stop()


@pytest.fixture
def agent(hub: SmallHub, tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess(hub, tmp_path / "home", token=hub.token())
    yield process
    process.close()


def _two_ranks(kind: str) -> Assignment:
    return Assignment(run_id=f"run-{kind}", job={"name": kind, "nodes": {"ranks": 2}, "fault": {"restarts": 0}})


def _ranks_that_said(hub: SmallHub, ending: str) -> set[int]:
    return {line.rank for line in hub.lines if line.text.endswith(ending)}


def test_lines_carry_their_rank_and_the_first_failure_is_the_reason(hub: SmallHub, agent: AgentProcess) -> None:
    hub.assign(_two_ranks("fail-rank-1"))
    hub.wait_for(lambda: hub.beats[-1:] != [] and hub.beats[-1].worker.state == "failed", "a failure", TORCHRUN_S)
    assert hub.beats[-1].worker.detail == "ValueError: no such luck on rank 1"
    hub.wait_for(lambda: _ranks_that_said(hub, "ready") == {0, 1}, "both ranks' lines")
    assert {line.text for line in hub.lines if line.rank == 1 and line.stream == "out"} == {
        "run-fail-rank-1 attempt 1 rank 1 ready"
    }
    assert [pid for pid in agent.pids("run-fail-rank-1") if is_alive(pid)] == []


def test_a_drain_reaches_every_rank_and_a_kill_too(hub: SmallHub, agent: AgentProcess, tmp_path: Path) -> None:
    hub.assign(_two_ranks("loop"))
    hub.wait_for(lambda: _ranks_that_said(hub, "armed") == {0, 1}, "two armed ranks", TORCHRUN_S)
    agent.send(signal.SIGTERM)
    assert agent.wait(60) == 0
    assert _ranks_that_said(hub, "drained") == {0, 1}

    hub.assign(_two_ranks("stubborn"))
    second = AgentProcess(hub, tmp_path / "home")
    wait_until(lambda: len(second.pids("run-stubborn")) == 2, "two ranks", TORCHRUN_S)
    ranks = second.pids("run-stubborn")
    second.process.kill()
    second.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in ranks), "the end of both ranks")

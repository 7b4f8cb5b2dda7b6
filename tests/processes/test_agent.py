"""The agent as a real process against a real HTTPS server: joining, working, failing, outages, and every way to end."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from net_processes import AgentProcess, is_alive, wait_until
from net_server import SmallHub

from ciuic.errors import CertificateError
from ciuic.net.messages import Assignment, HeartbeatRequest, WorkerState

StartAgent = Callable[..., AgentProcess]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    server = SmallHub(tmp_path / "hub").start()
    yield server
    server.stop()


@pytest.fixture
def agent(hub: SmallHub, tmp_path: Path) -> Iterator[StartAgent]:
    """Start an agent; with a token unless told otherwise."""
    started: list[AgentProcess] = []

    def start(**options: Any) -> AgentProcess:
        options.setdefault("token", hub.token() if not started else None)
        process = AgentProcess(hub, tmp_path / "home", **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


def _job(kind: str, **sections: Any) -> Assignment:
    return Assignment(run_id=f"run-{kind}", job={"name": kind, **sections})


def _in_state(state: WorkerState) -> Callable[[HeartbeatRequest], bool]:
    return lambda beat: beat.worker.state == state


def _texts(hub: SmallHub) -> list[str]:
    return [line.text for line in hub.lines]


def _armed(hub: SmallHub, times: int = 1) -> None:
    hub.wait_for(lambda: _texts(hub).count("armed") >= times, "an armed worker")


# ---- joining and identity ----


def test_a_machine_joins_and_tells_what_it_is(hub: SmallHub, agent: StartAgent) -> None:
    agent(claimed={"gpu": 8.0, "bandwidth_gbit_s": 10.0}, allow_code=True)
    beat = hub.wait_for_beat(lambda beat: "up_bits_per_s" in beat.measured, "measured values")
    assert beat.claimed == {"gpu": 8.0, "bandwidth_gbit_s": 10.0}
    assert beat.location == "us-west"
    assert beat.allow_code
    assert {"host", "platform", "python", "torch", "device", "ciuic"} <= set(beat.facts)
    assert {"rtt_s", "down_bits_per_s", "cpu_count", "memory_free_bytes", "disk_free_bytes"} <= set(beat.measured)
    assert abs(beat.measured["clock_offset_s"]) < 1.0
    assert {identity.name for identity in hub.identities if identity} == {"us-west"}


def test_a_restart_uses_the_same_identity_without_a_token(hub: SmallHub, agent: StartAgent) -> None:
    first = agent()
    hub.wait_for_beat(lambda _: True, "a beat")
    first.send(signal.SIGTERM)
    assert first.wait() == 0
    count = len(hub.beats)
    agent(token=None)
    hub.wait_for(lambda: len(hub.beats) > count, "a beat of the second process")
    assert hub.joined == 1
    assert hub.beats[-1].agent_incarnation != hub.beats[0].agent_incarnation


def test_a_token_given_again_keeps_its_uses(hub: SmallHub, agent: StartAgent) -> None:
    first = agent()
    hub.wait_for_beat(lambda _: True, "a beat")
    first.send(signal.SIGTERM)
    first.wait()
    count, token = len(hub.beats), hub.token()
    agent(token=token)
    hub.wait_for(lambda: len(hub.beats) > count, "a beat of the second process")
    assert hub.joined == 1
    assert len(hub.secrets) == 1


def test_without_token_and_identity_it_says_how_to_get_one(agent: StartAgent) -> None:
    process = agent(token=None)
    assert process.wait() == 3
    assert "error[CIUIC-201]" in process.said()
    assert "ciuic hub token create" in process.said()


def test_a_token_for_another_network_makes_a_new_identity_and_keeps_the_old_files(
    hub: SmallHub, agent: StartAgent, tmp_path: Path
) -> None:
    first = agent()
    hub.wait_for_beat(lambda _: True, "a beat")
    first.send(signal.SIGTERM)
    first.wait()
    other = SmallHub(tmp_path / "other").start()
    agent(url=other.url, token=other.token())
    other.wait_for_beat(lambda _: True, "a beat at the other hub")
    assert len(list(first.folder.glob("former-*/node.key"))) == 1
    other.stop()


def test_a_second_agent_of_the_same_identity_is_refused_on_this_machine(hub: SmallHub, agent: StartAgent) -> None:
    first = agent()
    hub.wait_for_beat(lambda _: True, "a beat")
    second = agent(token=None)
    assert second.wait() == 5
    assert f"process {first.process.pid} holds" in second.said()
    assert first.process.poll() is None


def test_a_killed_agent_does_not_keep_its_identity_locked(hub: SmallHub, agent: StartAgent) -> None:
    first = agent()
    hub.wait_for_beat(lambda _: True, "a beat")
    first.process.kill()
    first.wait()
    count = len(hub.beats)
    agent(token=None)
    hub.wait_for(lambda: len(hub.beats) > count, "a beat of the second process")


def test_an_evicted_identity_is_replaced_when_a_token_is_given(hub: SmallHub, agent: StartAgent) -> None:
    first = agent()
    hub.wait_for_beat(lambda _: True, "a beat")
    first.send(signal.SIGTERM)
    first.wait()

    def refuse_the_old(beat: HeartbeatRequest) -> None:
        if hub.joined == 1:
            raise CertificateError("the hub does not accept us-west", cause="it was evicted")

    hub.check = refuse_the_old
    count = len(hub.beats)
    agent(token=hub.token())
    hub.wait_for(lambda: len(hub.beats) > count, "a beat with the new identity")
    assert hub.joined == 2


# ---- workers ----


def test_a_run_is_worked_on_and_its_output_arrives_with_its_rank(hub: SmallHub, agent: StartAgent) -> None:
    process = agent()
    hub.assign(_job("finish"))
    beat = hub.wait_for_beat(_in_state("finished"), "a finished worker")
    assert (beat.worker.run_id, beat.worker.attempt, beat.worker.exit_code) == ("run-finish", 1, 0)
    hub.wait_for(lambda: "run-finish attempt 1 rank 0 ready" in _texts(hub), "the output")
    line = next(line for line in hub.lines if line.text.endswith("ready"))
    assert (line.rank, line.stream) == (0, "out")
    assert "ready" in (process.folder / "runs" / "run-finish" / "log").read_text()


def test_a_failing_worker_is_restarted_within_its_budget_and_the_reason_is_named(
    hub: SmallHub, agent: StartAgent
) -> None:
    process = agent()
    hub.assign(_job("fail", fault={"restarts": 2}))
    beat = hub.wait_for_beat(_in_state("failed"), "a failed worker")
    assert beat.worker.restarts == 2
    assert beat.worker.exit_code == 1
    assert beat.worker.detail == "ValueError: no such luck"
    assert len(process.pids("run-fail")) == 3


def test_a_worker_that_recovers_goes_on(hub: SmallHub, agent: StartAgent) -> None:
    agent()
    hub.assign(_job("fail-once"))
    beat = hub.wait_for_beat(lambda beat: beat.worker.state == "running" and beat.worker.restarts == 1, "a restart")
    assert beat.worker.detail == "ValueError: only this time"
    _armed(hub)


def test_a_worker_killed_by_the_kernel_is_reported_as_that(hub: SmallHub, agent: StartAgent) -> None:
    agent()
    hub.assign(_job("die", fault={"restarts": 0}))
    beat = hub.wait_for_beat(_in_state("failed"), "a failed worker")
    assert (beat.worker.exit_code, beat.worker.detail) == (137, "killed by SIGKILL (perhaps out of memory)")


def test_code_from_a_job_is_refused_with_its_code(hub: SmallHub, agent: StartAgent) -> None:
    process = agent()
    hub.assign(_job("loop", model={"command": ["python", "train.py"]}))
    beat = hub.wait_for_beat(_in_state("failed"), "a refusal")
    assert beat.worker.detail.startswith("error[CIUIC-204]")
    assert process.pids("run-loop") == []


def test_a_job_that_this_version_does_not_understand_is_refused(hub: SmallHub, agent: StartAgent) -> None:
    agent()
    hub.assign(_job("loop", from_the_future={"x": 1}))
    beat = hub.wait_for_beat(_in_state("failed"), "a refusal")
    assert beat.worker.detail.startswith("error[CIUIC-101]")


def test_stop_lets_the_worker_drain(hub: SmallHub, agent: StartAgent) -> None:
    agent()
    hub.assign(_job("loop"))
    _armed(hub)
    hub.assign(_job("loop"), stop_worker=True)
    beat = hub.wait_for_beat(_in_state("stopped"), "a stopped worker")
    assert beat.worker.exit_code == 0
    hub.wait_for(lambda: "drained" in _texts(hub), "the worker's last words")


def test_a_worker_that_ignores_the_request_is_killed_after_the_grace(hub: SmallHub, agent: StartAgent) -> None:
    process = agent(grace_s=0.3)
    hub.assign(_job("family"))
    _armed(hub)
    hub.assign(_job("family"), stop_worker=True)
    hub.wait_for_beat(_in_state("stopped"), "a stopped worker")
    assert [pid for pid in process.pids("run-family") if is_alive(pid)] == []


def test_a_run_that_is_gone_is_stopped_and_the_next_one_started(hub: SmallHub, agent: StartAgent) -> None:
    agent()
    hub.assign(_job("loop"))
    _armed(hub)
    hub.assign(_job("finish"))
    hub.wait_for_beat(lambda beat: beat.worker.run_id == "run-finish" and beat.worker.state == "finished", "run 2")
    hub.assign(None)
    hub.wait_for_beat(_in_state("none"), "an empty seat")


def test_a_new_attempt_starts_the_worker_afresh(hub: SmallHub, agent: StartAgent) -> None:
    agent()
    hub.assign(_job("finish"))
    hub.wait_for_beat(_in_state("finished"), "attempt 1")
    hub.assign(Assignment(run_id="run-finish", job={"name": "finish"}, attempt=2))
    hub.wait_for(lambda: "run-finish attempt 2 rank 0 ready" in _texts(hub), "attempt 2")


def test_a_flood_of_output_neither_blocks_the_worker_nor_is_lost(hub: SmallHub, agent: StartAgent) -> None:
    process = agent()
    hub.assign(_job("flood"))
    hub.wait_for(lambda: "armed" in _texts(hub), "the end of the flood")
    kept = sum(text.startswith("line ") or text.endswith(" ready") for text in _texts(hub))
    dropped = sum(int(text.split()[0]) for text in _texts(hub) if "were not sent" in text)
    assert kept + dropped == 50_001
    assert "flood is over" in (process.folder / "runs" / "run-flood" / "log").read_text()


# ---- outages ----


def test_an_outage_of_the_hub_leaves_the_worker_alone_and_is_said_once(hub: SmallHub, agent: StartAgent) -> None:
    process = agent()
    hub.assign(_job("loop"))
    _armed(hub)
    pids = process.pids("run-loop")
    hub.stop()
    wait_until(lambda: "the hub does not answer" in process.said(), "the outage noticed")
    time.sleep(1.0)  # several attempts fail meanwhile
    hub.start()
    count = len(hub.beats)
    hub.wait_for(lambda: len(hub.beats) > count + 1, "beats after the outage")
    wait_until(lambda: "the hub is back" in process.said(), "the return noticed")
    assert process.said().count("the hub does not answer") == 1
    assert process.said().count("the hub is back") == 1
    assert process.pids("run-loop") == pids
    assert is_alive(pids[0])


def test_lines_written_during_an_outage_arrive_after_it(hub: SmallHub, agent: StartAgent) -> None:
    process = agent()
    hub.assign(_job("fail-once"))
    hub.wait_for_beat(lambda beat: beat.worker.state == "starting" and beat.worker.restarts == 1, "the failure")
    hub.stop()
    wait_until(lambda: len(process.pids("run-fail-once")) == 2, "the restart")
    hub.start()
    _armed(hub)


def test_another_server_in_place_of_the_hub_is_an_outage_not_an_end(
    hub: SmallHub, agent: StartAgent, tmp_path: Path
) -> None:
    process = agent()
    hub.wait_for_beat(lambda _: True, "a beat")
    hub.stop()
    portal = SmallHub(tmp_path / "portal")
    portal.port = hub.port
    portal.start()
    wait_until(lambda: "no certificate of this network" in process.said(), "the portal noticed")
    portal.stop()
    count = len(hub.beats)
    hub.start()
    hub.wait_for(lambda: len(hub.beats) > count, "a beat after the portal is gone")


# ---- the end ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_worker_and_leaves(hub: SmallHub, agent: StartAgent, number: signal.Signals) -> None:
    process = agent()
    hub.assign(_job("loop"))
    _armed(hub)
    process.send(number)
    assert process.wait() == 0
    assert hub.left == ["us-west"]
    assert "drained" in _texts(hub)
    assert not is_alive(process.pids("run-loop")[0])


def test_while_draining_the_hub_is_told(hub: SmallHub, agent: StartAgent) -> None:
    process = agent(drain_s=3.0)
    hub.assign(_job("stubborn"))
    _armed(hub)
    process.send(signal.SIGTERM)
    beat = hub.wait_for_beat(lambda beat: beat.draining, "a draining beat")
    assert beat.worker.state == "running"
    assert process.wait() == 0
    assert not is_alive(process.pids("run-stubborn")[0])


def test_a_second_signal_kills_at_once(hub: SmallHub, agent: StartAgent) -> None:
    process = agent()
    hub.assign(_job("family"))
    _armed(hub)
    process.send(signal.SIGINT)
    hub.wait_for_beat(lambda beat: beat.draining, "a draining beat")
    began = time.monotonic()
    process.send(signal.SIGINT)
    assert process.wait() == 130
    assert time.monotonic() - began < 10
    assert [pid for pid in process.pids("run-family") if is_alive(pid)] == []


def test_draining_ends_although_the_hub_is_away(hub: SmallHub, agent: StartAgent) -> None:
    process = agent()
    hub.assign(_job("loop"))
    _armed(hub)
    hub.stop()
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert "could not be told" in process.said()


def test_nothing_outlives_a_killed_agent(hub: SmallHub, agent: StartAgent) -> None:
    process = agent()
    hub.assign(_job("family"))
    _armed(hub)
    pids = process.pids("run-family")
    assert len(pids) == 2
    process.process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the worker's family")


def test_an_evicted_agent_stops_its_worker_and_says_why(hub: SmallHub, agent: StartAgent) -> None:
    process = agent()
    hub.assign(_job("loop"))
    _armed(hub)
    hub.refuse = CertificateError("the hub does not accept us-west", cause="it was evicted")
    assert process.wait() == 3
    assert "error[CIUIC-202]: the hub does not accept us-west" in process.said()
    assert not is_alive(process.pids("run-loop")[0])


def test_an_older_agent_with_the_same_identity_elsewhere_gives_way(
    hub: SmallHub, agent: StartAgent, tmp_path: Path
) -> None:
    """The identity was copied to another machine (here: another home): the newer process is the node."""
    first = agent()
    hub.wait_for_beat(lambda _: True, "a beat")
    copy = tmp_path / "copy" / "nodes" / "us-west"
    copy.mkdir(parents=True)
    for name in ("identity.json", "authority.pem", "node.pem", "node.key"):
        (copy / name).write_bytes((first.folder / name).read_bytes())
    second = AgentProcess(hub, tmp_path / "copy")
    assert first.wait() == 5
    assert "CIUIC-405" in first.said()
    assert second.process.poll() is None
    second.close()

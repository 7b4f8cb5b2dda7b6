"""What each command asks of the hub and what it prints, beside a small hub with canned answers."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli_world import CliWorld, interrupt

import ciuic as package
from ciuic.bench.__main__ import main as bench_main
from ciuic.job import Job, job_schema
from ciuic.net.messages import (
    CreateTokenReply,
    EvaluationPoint,
    Event,
    HubInfo,
    NodeInfo,
    NodeInRun,
    Ok,
    RunInfo,
    RunState,
    SampleCounts,
    SubmitReply,
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CliWorld]:
    world = CliWorld(tmp_path)
    yield world
    world.close()


def a_run(state: RunState = "running", *, run_id: str = "tiny-1", created_at: float = 100.0, **more: Any) -> RunInfo:
    node = NodeInRun(
        node_id="us-west", state="training", step=40, tokens=9000, wall_s=10.0, communication_s=0.5, loss=3.25
    )
    evaluations = [
        EvaluationPoint(version=0, loss=5.5, node_id="us-west", time=1.0, samples_committed=0),
        EvaluationPoint(version=10, loss=3.5, node_id="us-west", time=2.0, samples_committed=80),
    ]
    fields = {
        "name": "tiny",
        "versions": [10],
        "nodes": [node],
        "evaluations": evaluations,
        "samples": SampleCounts(total=200, leased=100, committed=80),
        "progress": 0.4,
        **more,
    }
    return RunInfo(run_id=run_id, state=state, created_at=created_at, **fields)


def a_node(**more: Any) -> NodeInfo:
    measured = {"up_bits_per_s": 50e6, "rtt_s": 0.14}
    fields = {"location": "us-west", "state": "idle", "claimed": {"gpu": 8.0}, "measured": measured, **more}
    return NodeInfo(node_id="us-west", last_seen_s=0.4, **fields)


def job_file(folder: Path) -> str:
    path = folder / "job.toml"
    path.write_text('name = "tiny"\n[train]\nsamples = 200\n')
    return str(path)


def test_nodes_shows_claims_beside_measurements(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node()])
    header, row = world.ciuic("nodes").stdout.splitlines()
    assert header.split()[:3] == ["node", "state", "run"]
    assert "gpu 8" in row
    assert "50 Mbit/s" in row
    assert "140 ms" in row


def test_a_network_without_nodes_says_how_to_get_some(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [])
    assert "ciuic hub token create" in world.ciuic("nodes").stdout


def test_json_of_lists_is_the_hubs_own_messages(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node()])
    world.on("GET", "/v1/runs", [a_run()])
    assert msgspec.json.decode(world.ciuic("nodes", "--json").stdout, type=list[NodeInfo]) == [a_node()]
    assert msgspec.json.decode(world.ciuic("ps", "--json").stdout, type=list[RunInfo]) == [a_run()]


def test_ps_lists_the_newest_run_first(world: CliWorld) -> None:
    world.on("GET", "/v1/runs", [a_run(run_id="old", created_at=1), a_run(run_id="new", created_at=2)])
    lines = world.ciuic("ps").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "new", "old"]
    assert "5.500 -> 3.500" in lines[1]


def test_status_shows_the_newest_run_when_none_is_named(world: CliWorld) -> None:
    world.on("GET", "/v1/runs", [a_run(run_id="old", created_at=1), a_run(run_id="new", created_at=2)])
    world.on("GET", "/v1/runs/new", a_run(run_id="new"))
    text = world.ciuic("status").stdout
    assert "new (tiny)" in text
    assert "80 of 200 samples" in text
    assert "5.0%" in text  # communication of us-west


def test_status_without_any_run_says_so(world: CliWorld) -> None:
    world.on("GET", "/v1/runs", [])
    done = world.ciuic("status")
    assert done.returncode == 5
    assert "there are no runs yet" in done.stderr


def test_a_run_name_is_quoted_in_the_path(world: CliWorld) -> None:
    world.on("GET", "/v1/runs/a%2F..%2Fb", a_run(run_id="a/../b"))
    assert world.ciuic("status", "a/../b").returncode == 0


def test_hub_status_shows_hub_nodes_and_runs(world: CliWorld) -> None:
    info = HubInfo(url="https://hub:1", version="0", boot_id="b", started_at=1.0, nodes=[a_node()], runs=[a_run()])
    world.on("GET", "/v1/hub", info)
    text = world.ciuic("hub", "status").stdout
    assert all(word in text for word in ("https://hub:1", "us-west", "tiny-1"))


def test_a_token_is_alone_on_stdout_so_that_scripts_can_keep_it(world: CliWorld) -> None:
    token = world.hub.token()
    reply = CreateTokenReply(token=token, token_id="1", expires_at=5.0, uses=2)
    world.on("POST", "/v1/tokens", reply)
    done = world.ciuic("hub", "token", "create", "--lifetime", "2 h", "--uses", "2")
    assert done.stdout == f"{token}\n"
    assert "2 machines" in done.stderr
    assert f"ciuic node join {world.hub.url} " in done.stderr
    assert "ciuic1" not in done.stderr
    assert world.bodies[-1][2] == {"lifetime_s": 7200.0, "uses": 2, "role": "node"}


def test_stop_and_resume_tell_the_hub(world: CliWorld) -> None:
    world.on("POST", "/v1/runs/tiny-1/stop", Ok())
    world.on("POST", "/v1/runs/tiny-1/resume", Ok())
    assert world.ciuic("stop", "tiny-1").stdout == "tiny-1 is stopping\n"
    assert json.loads(world.ciuic("resume", "tiny-1", "--json").stdout) == {"ok": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--policy", "async"], {"policy": "async", "interval": 0, "codec_up": "", "codec_down": ""}),
        (["--interval", "16"], {"policy": "", "interval": 16, "codec_up": "", "codec_down": ""}),
        (["--compression", "int4"], {"policy": "", "interval": 0, "codec_up": "int4", "codec_down": "int4"}),
        (["--compression", "topk,int8"], {"policy": "", "interval": 0, "codec_up": "topk", "codec_down": "int8"}),
    ],
    ids=["policy", "interval", "both", "each"],
)
def test_sync_changes_only_what_is_given(world: CliWorld, options: list[str], expected: dict[str, Any]) -> None:
    world.on("POST", "/v1/runs/tiny-1/sync", Ok())
    assert "next round" in world.ciuic("sync", "tiny-1", *options).stdout
    assert world.bodies[-1][2] == expected


def test_sync_without_a_change_says_what_to_give(world: CliWorld) -> None:
    done = world.ciuic("sync", "tiny-1")
    assert done.returncode == 2
    assert "--policy, --interval or --compression" in done.stderr


def test_the_options_of_a_benchmark_are_its_own(
    world: CliWorld, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ciuic.bench.__main__.NAMES", {"hub": "the others import torch"})
    listed = world.ciuic("bench").stdout
    assert all(name in listed for name in ("codec", "sync", "learning", "ddp", "hub"))
    assert "--rounds" in world.program("bench", "hub", "--help").stdout
    with pytest.raises(SystemExit, match="2"):
        bench_main(["nosuch"])
    assert "nosuch" in capsys.readouterr().err


def test_a_benchmark_that_fails_gives_the_program_its_exit_code(
    world: CliWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert world.ciuic("bench", "hub").returncode == 1


def test_run_detached_submits_the_resolved_job_and_prints_the_run(world: CliWorld, tmp_path: Path) -> None:
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    done = world.ciuic("run", job_file(tmp_path), "--detach", "--submit-token", "t")
    assert done.stdout == "tiny-1\n"
    _, _, body = world.bodies[-1]
    assert body["submit_token"] == "t"
    assert body["job"]["train"]["samples"] == 200
    assert body["job"]["sync"] == Job().to_dict()["sync"]


def test_run_without_a_submit_token_makes_one_per_submission(world: CliWorld, tmp_path: Path) -> None:
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    for _ in range(2):
        world.ciuic("run", job_file(tmp_path), "--detach")
    first, second = (body["submit_token"] for _, _, body in world.bodies)
    assert len(first) >= 32
    assert first != second


def test_run_follows_to_the_end_in_plain_lines(world: CliWorld, tmp_path: Path) -> None:
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    world.on("GET", "/v1/runs/tiny-1", a_run("waiting", nodes=[]), a_run("running"), a_run("finished", progress=1.0))
    done = world.ciuic("run", job_file(tmp_path))
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "tiny-1 submitted; ctrl-c stops watching, not the run",
        "tiny-1 waiting 40% version 10 held-out loss 5.500 -> 3.500 at version 10 nodes 0",
        "tiny-1 running 40% version 10 held-out loss 5.500 -> 3.500 at version 10 nodes 1",
        "tiny-1 finished 100% version 10 held-out loss 5.500 -> 3.500 at version 10 nodes 1",
    ]


def test_a_failed_run_is_exit_code_7_with_its_reason(world: CliWorld, tmp_path: Path) -> None:
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    world.on("GET", "/v1/runs/tiny-1", a_run("failed", reason="us-west: ValueError: no data"))
    done = world.ciuic("run", job_file(tmp_path))
    assert done.returncode == 7
    assert done.stderr.splitlines()[:2] == [
        "error[CIUIC-600]: tiny-1 failed",
        "cause: us-west: ValueError: no data",
    ]


def test_with_json_a_followed_run_prints_only_its_last_state(world: CliWorld, tmp_path: Path) -> None:
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    world.on("GET", "/v1/runs/tiny-1", a_run("running"), a_run("finished"))
    done = world.ciuic("run", job_file(tmp_path), "--json")
    assert msgspec.json.decode(done.stdout, type=RunInfo).state == "finished"
    assert done.stderr == ""


def test_with_json_a_failed_run_is_still_one_document(world: CliWorld, tmp_path: Path) -> None:
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    world.on("GET", "/v1/runs/tiny-1", a_run("stopped"))
    done = world.ciuic("run", job_file(tmp_path), "--json")
    assert done.returncode == 7
    assert json.loads(done.stdout)["state"] == "stopped"


def test_ctrl_c_while_watching_leaves_the_run_alone(world: CliWorld, tmp_path: Path) -> None:
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    world.on("GET", "/v1/runs/tiny-1", a_run("running"))
    process = world.start("run", job_file(tmp_path))
    world.wait_for_requests(2)
    _, stderr = interrupt(process)
    assert process.returncode == 130
    assert "the run goes on" in stderr
    assert not [path for _, path, _ in world.bodies if path.endswith("stop")]


def test_watching_outlives_a_hub_that_restarts(world: CliWorld, tmp_path: Path) -> None:
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    world.on("GET", "/v1/runs/tiny-1", a_run("running"))
    process = world.start("run", job_file(tmp_path))
    assert process.stdout is not None
    world.wait_for_requests(2)
    world.hub.stop()
    lines = iter(process.stdout.readline, "")
    assert next(line for line in lines if "still trying" in line)
    world.on("GET", "/v1/runs/tiny-1", a_run("finished"))
    world.hub.start()
    rest, _ = process.communicate(timeout=30)
    assert "finished" in rest
    assert process.returncode == 0


def test_logs_name_the_node_and_the_rank_and_carry_no_control_characters(world: CliWorld) -> None:
    line = {"id": 1, "node_id": "us-west", "time": 1.0, "rank": 0, "stream": "out", "text": "step 1 \x1b[2J"}
    agent = {**line, "id": 2, "stream": "agent", "text": "worker started"}
    body = b"".join(json.dumps(each).encode() + b"\n" for each in (line, agent))
    world.on("GET", "/v1/runs/tiny-1/logs", body)
    done = world.ciuic("logs", "tiny-1", "--node", "us-west")
    times, lines = zip(*(each.split(" ", 1) for each in done.stdout.splitlines()), strict=True)
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", each) for each in times)
    assert list(lines) == [
        "us-west/0 | step 1 \N{REPLACEMENT CHARACTER}[2J",
        "us-west/agent | worker started",
    ]
    assert world.queries[-1] == {"node": ["us-west"], "after": ["0"], "follow": ["0"]}
    documents = world.ciuic("logs", "tiny-1", "--json").stdout.splitlines()
    assert [json.loads(each) for each in documents] == [line, agent]


def test_events_followed_go_on_after_the_last_one_seen(world: CliWorld) -> None:
    first = Event(id=7, time=1.0, kind="node.joined", node_id="us-west", text="us-west joined")
    world.on("GET", "/v1/events", msgspec.json.encode(first) + b"\n", b"")
    process = world.start("events", "-f")
    world.wait_for_requests(2)
    stdout, _ = interrupt(process)
    assert "node.joined" in stdout
    assert [query["after"] for query in world.queries[:2]] == [["0"], ["7"]]
    assert process.returncode == 130


def test_a_reader_that_has_enough_is_no_error_text(world: CliWorld) -> None:
    event = msgspec.json.encode(Event(id=1, time=1.0, kind="x" * 200)) + b"\n"
    world.on("GET", "/v1/events", event * 20_000)
    process = world.start("events")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_line_that_is_no_event_is_a_protocol_error(world: CliWorld) -> None:
    world.on("GET", "/v1/events", b'{"id": "x"}\n')
    assert world.ciuic("events").returncode == 5


def test_schema_is_the_schema_of_the_job_file(world: CliWorld) -> None:
    assert json.loads(world.ciuic("schema").stdout) == job_schema()


def test_env_needs_no_hub_and_names_versions_and_the_home(world: CliWorld) -> None:
    facts = json.loads(world.ciuic("env", "--json").stdout)
    assert facts["ciuic"] == package.__version__
    assert facts["CIUIC_HOME"] == str(world.home)
    assert {"python", "platform", "cores", "memory", "torch", "cuda", "codec"} <= set(facts)
    assert f"ciuic         {package.__version__}" in world.ciuic("env").stdout


def test_node_check_shows_each_step_of_the_way_to_the_hub(world: CliWorld) -> None:
    done = world.ciuic("node", "check", world.hub.url)
    assert done.returncode == 0, done.stdout
    states = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()[1:]}
    assert {"tcp", "tls", "hub", "clock", "disk", "torch"} <= set(states)
    assert set(states.values()) == {"ok"}


def test_node_check_fails_loudly_when_the_hub_is_not_there(world: CliWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ciuic.node.check.check_devices", list)  # the check before has imported torch
    world.close()
    done = world.ciuic("node", "check", world.hub.url, "--json")
    assert done.returncode == 7
    assert [check["name"] for check in json.loads(done.stdout) if not check["ok"]] == ["tcp"]
    assert "cannot take part yet: tcp" in world.ciuic("node", "check", world.hub.url).stderr


def test_commands_of_one_moment_do_not_disturb_each_other(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node()])
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(world.program("nodes").returncode)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0, 0, 0]

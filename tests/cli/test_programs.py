"""Each command once as a program of its own: it says what the same line says inside of a test."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.cli_world import CliWorld

from ciuic.net.messages import CreateTokenReply, Event, HubInfo, MeasureReply, NodeInfo, Ok, RunInfo, SubmitReply

LINES = [
    ("nodes",),
    ("nodes", "show", "us"),
    ("nodes", "links"),
    ("nodes", "evict", "us", "--yes"),
    ("ps",),
    ("ps", "--json"),
    ("status", "tiny-1"),
    ("logs", "tiny-1"),
    ("events",),
    ("sync", "tiny-1", "--interval", "16"),
    ("stop", "tiny-1"),
    ("resume", "tiny-1"),
    ("hub", "status"),
    ("hub", "token", "create"),
    ("plan", "--parameters", "5M"),
    ("schema",),
    ("env",),
    ("lgs",),
]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CliWorld]:
    world = CliWorld(tmp_path)
    node = NodeInfo(node_id="us", location="us", state="idle", measured={"up_bits_per_s": 5e7, "rtt_s": 0.1})
    run = RunInfo(run_id="tiny-1", name="tiny", state="finished", created_at=1.0)
    event = msgspec.json.encode(Event(id=1, time=1.0, kind="node.joined", node_id="us", text="us joined")) + b"\n"
    line = {"id": 1, "node_id": "us", "time": 1.0, "rank": 0, "stream": "out", "text": "step 1"}
    world.on("GET", "/v1/nodes", [node])
    world.on("POST", "/v1/nodes/us/evict", Ok())
    world.on("POST", "/v1/nodes/us/measure", MeasureReply(ticket=7))
    world.on("GET", "/v1/runs", [run])
    world.on("GET", "/v1/runs/tiny-1", run)
    world.on("GET", "/v1/runs/tiny-1/logs", json.dumps(line).encode() + b"\n")
    world.on("GET", "/v1/events", event)
    for verb in ("sync", "stop", "resume"):
        world.on("POST", f"/v1/runs/tiny-1/{verb}", Ok())
    world.on("GET", "/v1/hub", HubInfo(url=world.hub.url, version="0", boot_id="b", started_at=1.0, nodes=[node]))
    world.on("POST", "/v1/tokens", CreateTokenReply(token=world.hub.token(), token_id="1", expires_at=5.0, uses=1))
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    yield world
    world.close()


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_command_is_the_same_in_a_process_of_its_own(words: tuple[str, ...], world: CliWorld) -> None:
    here, there = world.ciuic(*words), world.program(*words)
    assert there.returncode == here.returncode
    assert [line.split(":")[0] for line in there.stdout.splitlines()] == [
        line.split(":")[0] for line in here.stdout.splitlines()
    ] or words == ("env",)
    assert there.stderr == here.stderr
    assert here.returncode == (2 if words == ("lgs",) else 0), here.stderr


def test_a_job_is_submitted_and_followed_by_a_process_of_its_own(world: CliWorld, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('name = "tiny"\n')
    assert world.program("run", str(path), "--detach").stdout == "tiny-1\n"
    assert "tiny-1 finished" in world.program("run", str(path)).stdout

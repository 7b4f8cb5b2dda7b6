"""`ciuic nodes` and `ciuic node drain` beside a small hub with canned answers."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli_world import CliWorld

from ciuic.errors import NotFoundError
from ciuic.net.messages import MeasureReply, NodeInfo, Ok

MEASURED = {
    "up_bits_per_s": 2.5e9,
    "up_1_stream_bits_per_s": 0.1e9,
    "up_streams": 16.0,
    "down_bits_per_s": 5e9,
    "down_streams": 8.0,
    "rtt_s": 0.09,
    "loss_share": 0.012,
    "gpu_count": 4.0,
    "cpu_flops": 1.5e12,
    "odd": 3.0,
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CliWorld]:
    world = CliWorld(tmp_path)
    yield world
    world.close()


def a_node(name: str = "us-west", **more: Any) -> NodeInfo:
    fields = {
        "location": name,
        "state": "idle",
        "claimed": {"gpu": 8.0, "bandwidth_gbit_s": 10.0, "colour": 1.0},
        "measured": MEASURED,
        "measured_at": time.time() - 7200,
        "facts": {"host": "h1"},
        "last_seen_s": 0.4,
        **more,
    }
    return NodeInfo(node_id=name, **fields)


def test_the_table_has_claims_measurements_their_age_and_when_a_node_was_seen(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node(), a_node("moon", measured={}, measured_at=None, last_seen_s=None)])
    header, first, second = world.ciuic("nodes").stdout.splitlines()
    assert header.split()[-5:] == ["gpus", "measured", "ago", "seen", "ago"]
    assert "bandwidth_gbit_s 10, colour 1, gpu 8" in first
    assert all(word in first for word in ("2.5 Gbit/s", "90 ms", "2 h 0 min", "400 ms"))
    assert "never" in second
    assert "not since the hub started" in second


def test_show_puts_every_claim_beside_its_measurement(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node(), a_node("moon")])
    text = world.ciuic("nodes", "show", "us-west").stdout
    rows = {line[:28].strip(): line[28:].split("  ") for line in text.partition("\n\n")[2].splitlines()[1:]}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in rows.items()}
    assert cells["to the hub"] == ["10 Gbit/s", "2.5 Gbit/s", "25%"]
    assert cells["GPUs"] == ["8", "4", "50%"]
    assert cells["sent again (loss estimate)"] == ["-", "1.20%"]
    assert cells["processors, matrix product"] == ["-", "1.5 Tflop/s"]
    assert cells["colour"] == ["1", "-"]
    assert cells["odd"] == ["-", "3"]
    assert "host" in text


def test_show_as_json_is_the_hubs_own_message(world: CliWorld) -> None:
    node = a_node()
    world.on("GET", "/v1/nodes", [node])
    assert msgspec.json.decode(world.ciuic("nodes", "show", "us-west", "--json").stdout, type=NodeInfo) == node


def test_an_unknown_node_is_named_with_the_known_ones(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node()])
    done = world.ciuic("nodes", "show", "su-west")
    assert done.returncode == 5
    assert "one of: us-west" in done.stderr
    assert world.ciuic("nodes", "measure", "su-west").returncode == 5


def test_measure_asks_waits_and_prints_what_was_found(world: CliWorld) -> None:
    before, after = a_node(), a_node(measure_ticket=7, measured_at=time.time())
    world.on("GET", "/v1/nodes", [before, a_node("gone", state="left")], [before], [after])
    world.on("POST", "/v1/nodes/us-west/measure", MeasureReply(ticket=7))
    done = world.ciuic("nodes", "measure")
    assert done.returncode == 0, done.stderr
    header, row = done.stdout.splitlines()
    assert header.split()[:4] == ["node", "up", "down", "streams"]
    assert "16/8" in row
    assert "1.20%" in row
    assert "1.5 Tflop/s" in row
    assert [path for method, path, _ in world.bodies if method == "POST"] == ["/v1/nodes/us-west/measure"]


def test_a_node_that_works_is_said_to_be_measured_only_in_part(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node(measure_ticket=7)])
    world.on("POST", "/v1/nodes/us-west/measure", MeasureReply(ticket=7))
    done = world.ciuic("nodes", "measure", "us-west")
    assert done.returncode == 0
    assert "us-west works: only" in done.stderr


def test_a_node_that_does_not_answer_makes_the_command_fail(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node()])
    world.on("POST", "/v1/nodes/us-west/measure", MeasureReply(ticket=7))
    done = world.ciuic("nodes", "measure", "us-west", "--wait", "0 s")
    assert done.returncode == 7
    assert "us-west has not answered" in done.stderr
    as_json = world.ciuic("nodes", "measure", "us-west", "--wait", "0 s", "--json")
    assert as_json.returncode == 7
    assert json.loads(as_json.stdout)[0]["node_id"] == "us-west"


def test_links_between_nodes_are_labelled_as_computed(world: CliWorld) -> None:
    slow = a_node("eu", measured={"up_bits_per_s": 1e6, "down_bits_per_s": 2e6, "rtt_s": 0.2})
    world.on("GET", "/v1/nodes", [a_node(), slow, a_node("new", measured={}), a_node("gone", state="dead")])
    done = world.ciuic("nodes", "links")
    lines = done.stdout.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["us-west", "eu"], ["eu", "us-west"]]
    assert "2 Mbit/s" in lines[0]
    assert "1 Mbit/s" in lines[1]
    assert all("290 ms" in line and "through the hub" in line for line in lines)
    assert "computed" in done.stderr
    found = json.loads(world.ciuic("nodes", "links", "--json").stdout)
    assert found[0]["bits_per_s"] == 2e6


def test_evict_needs_a_yes(world: CliWorld) -> None:
    world.on("POST", "/v1/nodes/us-west/evict", Ok())
    refused = world.ciuic("nodes", "evict", "us-west")
    assert refused.returncode != 0
    assert world.bodies == []
    assert world.ciuic("nodes", "evict", "us-west", "--yes").stdout == "us-west is evicted\n"
    assert json.loads(world.ciuic("nodes", "evict", "us-west", "--json").stdout) == {"ok": True}


def test_what_the_hub_refuses_is_shown(world: CliWorld) -> None:
    world.on("POST", "/v1/nodes/nobody/evict", NotFoundError("there is no node 'nobody'"))
    done = world.ciuic("nodes", "evict", "nobody", "--yes")
    assert done.returncode == 5
    assert "there is no node" in done.stderr


def test_a_machine_without_a_node_cannot_drain(world: CliWorld) -> None:
    done = world.ciuic("node", "drain")
    assert done.returncode == 2
    assert "ciuic node join" in done.stderr

"""`ciuic plan`: the resolved job, the links, the choice and its reasons, with a hub and without."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli_world import CliWorld, Done, ciuic, command, program_environment

from ciuic.job import Job
from ciuic.net.messages import NodeInfo, NodeInRun, RunInfo

WHAT_IF = ("--link", "20Mbit/s", "--rtt", "220ms", "--count", "3", "--step-s", "0.6", "--parameters", "5M")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CliWorld]:
    world = CliWorld(tmp_path)
    yield world
    world.close()


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    return program_environment(CIUIC_HOME=str(tmp_path / "empty"))


def job_file(folder: Path, text: str = "") -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


def a_node(name: str, mbit_s: float | None = 20.0, **more: Any) -> NodeInfo:
    measured = {} if mbit_s is None else {"up_bits_per_s": mbit_s * 1e6, "down_bits_per_s": 1e8, "rtt_s": 0.2}
    fields = {"location": name, "state": "idle", "measured": measured, **more}
    return NodeInfo(node_id=name, **fields)


def a_run(step_s: float, job: Job | None = None) -> RunInfo:
    nodes = [NodeInRun(node_id="us", state="training", step_s=step_s)]
    job = job or Job()
    return RunInfo(run_id="r1", name="r", state="running", created_at=1.0, job=job.to_dict(), nodes=nodes)


def tables(done: Done) -> tuple[dict[str, list[str]], str]:
    """The settings by name (value and source), and everything below them."""
    settings, _, rest = done.stdout.partition("\n\n")
    rows = [line.split() for line in settings.splitlines()[1:]]
    return {row[0]: row[1:] for row in rows}, rest


def test_without_a_hub_a_link_can_be_imagined(nowhere: dict[str, str]) -> None:
    done = ciuic("plan", *WHAT_IF, environment=nowhere)
    assert done.returncode == 0, done.stderr
    settings, rest = tables(done)
    assert settings["sync.interval"][1:] == ["what", "if"]
    assert settings["optim.lr"] == ["0.004", "default"]
    assert "model: 5.0M parameters (given)" in rest
    assert "node-3" in rest
    assert "of the time goes into steps" in rest
    assert "220 ms round trip" in rest


def test_lines_are_at_most_a_hundred_wide_and_columns_align(nowhere: dict[str, str]) -> None:
    lines = ciuic("plan", *WHAT_IF, environment=nowhere).stdout.splitlines()
    assert max(len(line) for line in lines) <= 100
    start = next(i for i, line in enumerate(lines) if line.startswith("codec "))
    header, rows = lines[start], lines[start + 1 : start + 5]
    for column in ("bytes", "exposed", "total"):
        at = header.index(column)
        assert all(row[at - 1] == " " and row[at] != " " for row in rows)


def test_what_was_rejected_comes_with_the_reason(nowhere: dict[str, str]) -> None:
    body = json.loads(ciuic("plan", *WHAT_IF, "--json", environment=nowhere).stdout)
    assert len(body["alternatives"]) >= 4
    assert all(other["why_not"] for other in body["alternatives"])
    assert min(other["round"]["loss_at_equal_time"] for other in body["alternatives"]) >= (
        body["round"]["loss_at_equal_time"] - 0.01
    )
    assert body["parameters"] == 5_000_000
    assert len(body["explanation"]) >= 4
    assert body["sync"]["codec_up"] in body["codec_speeds"]


def test_what_the_job_gives_is_used_and_named_given(tmp_path: Path, nowhere: dict[str, str]) -> None:
    path = job_file(tmp_path, '[sync]\ninterval = 2\ncompression = "none"\n')
    settings, rest = tables(ciuic("plan", path, *WHAT_IF, environment=nowhere))
    assert settings["sync.interval"] == ["2", "given"]
    assert settings["sync.compression"] == ["none", "given"]
    assert 'with "auto" it would be' in rest
    assert "times as fast" in rest


def test_measured_links_and_steps_of_an_earlier_run_make_the_choice(world: CliWorld, tmp_path: Path) -> None:
    world.on("GET", "/v1/nodes", [a_node("us"), a_node("eu", 50.0)])
    world.on("GET", "/v1/runs", [a_run(0.6)])
    settings, rest = tables(world.ciuic("plan", job_file(tmp_path), "--parameters", "5M"))
    assert settings["sync.interval"][1] == "measured"
    assert settings["sync.compression"][1] == "measured"
    assert "us is the slowest" in rest
    assert "600 ms" in rest


def test_steps_of_another_model_are_not_taken(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node("us")])
    other = Job.model_validate({"optim": {"batch_size": 64}})
    world.on("GET", "/v1/runs", [a_run(0.6, other)])
    done = world.ciuic("plan", "--parameters", "5M")
    assert tables(done)[0]["sync.interval"] == ["8", "default"]
    assert "give --step-s, or run the job once" in done.stdout


def test_nodes_that_would_not_take_part_say_why(world: CliWorld, tmp_path: Path) -> None:
    nodes = [
        a_node("us"),
        a_node("gone", state="dead"),
        a_node("mars"),
        a_node("eu", None),
        a_node("ap", run_id="other-run"),
    ]
    world.on("GET", "/v1/nodes", nodes)
    path = job_file(tmp_path, '[nodes]\nlocations = ["us", "eu", "ap"]\n')
    body = json.loads(world.ciuic("plan", path, "--step-s", "0.6", "--parameters", "5M", "--json").stdout)
    said = {node["node"]: (node["takes_part"], node["remark"]) for node in body["nodes"]}
    assert said == {
        "us": (True, ""),
        "gone": (False, "dead"),
        "mars": (False, "its location mars is not in the job's"),
        "eu": (True, "not measured yet"),
        "ap": (True, "busy with other-run now"),
    }
    assert body["sources"]["sync.interval"] == "measured"


def test_before_any_measurement_the_default_is_shown_with_what_is_missing(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node("us", None)])
    world.on("GET", "/v1/runs", [])
    done = world.ciuic("plan", "--parameters", "5M")
    assert tables(done)[0]["sync.compression"] == ["1-bit", "default"]
    assert "no link is measured yet" in done.stdout


def test_without_nodes_the_default_is_shown(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [])
    world.on("GET", "/v1/runs", [])
    assert "no node would take part" in world.ciuic("plan", "--parameters", "5M").stdout


def test_the_size_of_a_preset_is_counted_by_another_process(nowhere: dict[str, str]) -> None:
    """That process imports torch, which takes long on a busy machine."""
    words = command("plan", *WHAT_IF[:-2], "--json")
    done = subprocess.run(words, env=nowhere, capture_output=True, text=True, timeout=240, check=False)
    assert 600_000 < json.loads(done.stdout)["parameters"] < 900_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--link", "fast"), "'fast' is not a rate"),
        (("--link", "1Mbit/s,2Mbit/s,3Mbit/s"), "is not a link"),
        (("--link", "1Mbit/s", "--rtt", "soon"), "'soon' is not a duration"),
        (("--link", "1Mbit/s", "--parameters", "many"), "'many' is not a number of parameters"),
        (("--link", "1Mbit/s", "--step-s", "-1"), "is not a step time"),
    ],
)
def test_what_cannot_be_read_is_named(words: tuple[str, ...], message: str, nowhere: dict[str, str]) -> None:
    done = ciuic("plan", *words, environment=nowhere)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_program_of_ones_own_needs_its_size(tmp_path: Path, nowhere: dict[str, str]) -> None:
    path = job_file(tmp_path, '[model]\ncommand = ["python", "train.py"]\n')
    done = ciuic("plan", path, *WHAT_IF[:-2], environment=nowhere)
    assert done.returncode == 2
    assert "--parameters 5M" in done.stderr


def test_without_a_hub_the_error_names_the_way_without_one(nowhere: dict[str, str]) -> None:
    done = ciuic("plan", environment=nowhere)
    assert done.returncode == 3
    assert "--link" in done.stderr


def test_an_unknown_node_is_named_with_the_known_ones(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [a_node("us")])
    done = world.ciuic("plan", "--nodes", "su")
    assert done.returncode == 2
    assert "one of: us" in done.stderr


def test_the_command_of_the_page_about_choosing_runs(nowhere: dict[str, str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "choosing.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("ciuic plan ")]
    done = ciuic(*line.split()[1:], environment=nowhere)
    assert done.returncode == 0
    assert "of the time goes into steps" in done.stdout


def test_requirements_are_compared_with_what_was_measured_and_places_go_to_the_better_links(
    world: CliWorld, tmp_path: Path
) -> None:
    claims = {"gpu": 8.0, "up_mbit": 900.0}
    nodes = [
        a_node("slow", 25.0),
        a_node("poor", 5.0, claimed=claims),
        a_node("fast", 900.0),
        a_node("new", None),
        a_node("middle", 100.0),
    ]
    world.on("GET", "/v1/nodes", nodes)
    path = job_file(tmp_path, "[nodes]\nmin = 1\nmax = 2\nrequire = {up_mbit = 20}\n")
    body = json.loads(world.ciuic("plan", path, "--step-s", "0.6", "--parameters", "5M", "--json").stdout)
    said = {node["node"]: (node["takes_part"], node["remark"]) for node in body["nodes"]}
    assert said == {
        "slow": (False, "the job takes 2, and others are better"),
        "poor": (False, "up_mbit must be 20, measured 5"),
        "fast": (True, ""),
        "new": (False, "up_mbit is not measured yet"),
        "middle": (True, ""),
    }
    expected = {node["node"]: (node["communication_share"], node["tokens_per_s"]) for node in body["nodes"]}
    assert expected["new"] == (None, None)
    assert expected["poor"][0] >= expected["middle"][0] >= expected["fast"][0]
    assert 0 < expected["poor"][1] <= expected["middle"][1] <= 8 * 128 / 0.6
    assert "tokens/s" in world.ciuic("plan", path, "--step-s", "0.6", "--parameters", "5M").stdout

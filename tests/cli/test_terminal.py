"""What a person sees in a real terminal (a pseudo-terminal): a live table while watching, tables elsewhere."""

import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_world import CliWorld, command

from ciuic.net.messages import NodeInfo, NodeInRun, RunInfo, SubmitReply


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CliWorld]:
    world = CliWorld(tmp_path)
    yield world
    world.close()


def in_terminal(world: CliWorld, *arguments: str) -> tuple[int, str]:
    """Run the program with a terminal as its output; exit code and everything it drew."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*arguments), env=world.environment(TERM="xterm"), stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    drawn = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux says so when the last writer has closed
            break
        if not piece:
            break
        drawn += piece
    os.close(ours)
    return process.wait(timeout=30), drawn.decode()


def a_run(state: str) -> RunInfo:
    node = NodeInRun(node_id="us-west", state="training", step=40, tokens=9000, wall_s=10.0)
    return RunInfo(run_id="tiny-1", name="tiny", state=state, created_at=1.0, nodes=[node])  # type: ignore[arg-type]


def test_watching_draws_one_table_that_changes(world: CliWorld, tmp_path: Path) -> None:
    world.on("POST", "/v1/runs", SubmitReply(run_id="tiny-1", created=True))
    world.on("GET", "/v1/runs/tiny-1", a_run("running"), a_run("finished"))
    job = tmp_path / "job.toml"
    job.write_text("")
    code, drawn = in_terminal(world, "run", str(job))
    assert code == 0
    assert "\x1b[" in drawn  # the cursor moves: the table is drawn over itself
    assert drawn.index("running") < drawn.index("finished")
    assert "us-west" in drawn


def test_lists_are_tables_with_a_rule_below_the_header(world: CliWorld) -> None:
    world.on("GET", "/v1/nodes", [NodeInfo(node_id="us-west", location="us-west", state="idle")])
    _, drawn = in_terminal(world, "nodes")
    lines = [line.strip() for line in drawn.splitlines() if line.strip()]
    assert "round trip" in " ".join(lines[0].split())
    assert set(lines[1]) <= set("─ ")
    assert lines[2].startswith("us-west")


def test_the_word_error_is_coloured_only_in_a_terminal(world: CliWorld) -> None:
    _, drawn = in_terminal(world, "lgs")
    assert "\x1b[1;31merror[CIUIC-100]\x1b[0m: no such command" in drawn
    assert "\x1b" not in world.ciuic("lgs").stderr

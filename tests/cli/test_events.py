"""`ciuic events`: what is asked of the hub, and the story of a run as a person reads it."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.cli_world import CliWorld

from ciuic.net.messages import Event


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CliWorld]:
    made = CliWorld(tmp_path)
    yield made
    made.close()


def lines(*events: tuple[float, str, str]) -> bytes:
    made = [Event(id=n, time=t, kind=kind, run_id="r", text=text) for n, (t, kind, text) in enumerate(events, start=1)]
    return b"".join(msgspec.json.encode(event) + b"\n" for event in made)


def test_filters_are_the_hubs_work(world: CliWorld) -> None:
    world.on("GET", "/v1/events", b"")
    done = world.ciuic("events", "--kind", "node", "--kind", "round.closed", "--node", "a", "--since", "10 min")
    assert done.returncode == 0, done.stderr
    (query,) = world.queries
    assert (query["kind"], query["node"], "run" in query) == (["node", "round.closed"], ["a"], False)
    assert int(query["since"][0]) > 1_700_000_000
    assert world.ciuic("events", "--since", "soon").returncode == 2


def test_a_story_has_times_since_its_beginning_and_folds_rounds_unless_all_are_wanted(world: CliWorld) -> None:
    body = lines(
        (100.0, "run.submitted", "r was submitted"),
        (160.0, "round.closed", "round 1 closed"),
        (161.0, "round.closed", "round 2 closed"),
        (3761.0, "node.dead", "a is dead"),
    )
    world.on("GET", "/v1/events", body)
    told = world.ciuic("events", "--run", "r").stdout.splitlines()
    assert [line.split()[0] for line in told[1:]] == ["+0:00:00", "+0:01:00", "+1:01:01"]
    assert "closed in 1.0 s" in told[2]
    assert world.queries[0]["hub"] == ["1"]
    every = world.ciuic("events", "--run", "r", "--all").stdout
    assert "round 1 closed" in every
    assert "round 2 closed" in every
    assert world.ciuic("events", "--run", "r", "--json").stdout.encode() == body


def test_a_followed_story_goes_on_after_what_was_told(world: CliWorld) -> None:
    later = msgspec.json.encode(Event(id=9, time=130.0, kind="node.back", run_id="r", text="a is back")) + b"\n"
    world.on("GET", "/v1/events", lines((100.0, "run.submitted", "r was submitted")), later)
    process = world.start("events", "--run", "r", "-f")
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(3)]
    world.wait_for_requests(4)
    process.kill()
    process.communicate(timeout=30)
    assert told[-1] == " +0:00:30  node.back         a is back\n"
    asked = [(query["after"], query["follow"]) for query in world.queries]
    assert asked[:2] == [(["0"], ["0"]), (["1"], ["1"])]
    assert (["9"], ["1"]) in asked

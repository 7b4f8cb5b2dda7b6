"""Tables and lines about nodes and runs, and how they are drawn."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ciuic.cli import node_views, views
from ciuic.cli.output import Grid, clean, plain_table, rich_table
from ciuic.cli.watch import run_picture
from ciuic.net.messages import Event, NodeInfo, NodeInRun, RunInfo, SampleCounts

SPARSE = RunInfo(run_id="r", name="n", state="waiting", created_at=10.0)


def drawn(renderable: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_columns_line_up_and_lines_have_no_trailing_blanks() -> None:
    lines = plain_table(Grid(columns=("a", "bb"), rows=[("long", ""), ("x", "y")]))
    assert lines == ["a     bb", "long", "x     y"]


def test_in_a_narrow_terminal_names_and_quantities_stay_whole() -> None:
    columns = ("node", "claimed", "up", "round trip")
    row = ("eu-central", "bandwidth 10, gpu 8", "1.98 Gbit/s", "140 ms")
    grid = Grid(columns=columns, rows=[row], minor=("claimed",))
    for width in (60, 50, 44, 36):
        lines = drawn(rich_table(grid), width).splitlines()
        assert all(any(cell in line for line in lines) for cell in ("eu-central", "1.98 Gbit/s", "140 ms"))
        assert max(map(len, lines)) <= width
        assert ("claimed" in "".join(lines)) == (width >= 44)


def test_a_run_of_which_nothing_is_known_yet_can_be_shown() -> None:
    assert views.runs_grid([SPARSE], now=70.0).rows == [
        ("r", "n", "waiting", "0%", "-", "0", "-", "1 min 0 s"),
    ]
    assert dict(views.run_facts(SPARSE, now=70.0))["held-out loss"] == "-"
    assert "waiting" in drawn(run_picture(SPARSE))


def test_a_node_that_was_not_seen_says_so() -> None:
    node = NodeInfo(node_id="a", location="a", state="dead")
    assert node_views.nodes_grid([node], now=0.0).rows[0][-1] == "not since the hub started"


def test_differing_losses_are_shown_loudly() -> None:
    run = RunInfo(run_id="r", name="n", state="finished", created_at=0.0, loss_consistent=False)
    assert "DIFFER" in dict(views.run_facts(run, now=1.0))["consistency"]


def test_duplicated_and_lost_samples_are_not_hidden() -> None:
    counts = SampleCounts(total=10, committed=9, duplicated=2, lost=1)
    run = RunInfo(run_id="r", name="n", state="finished", created_at=0.0, samples=counts)
    assert dict(views.run_facts(run, now=1.0))["progress"].endswith("9 of 10 samples (2 twice, 1 lost)")


def test_staleness_stands_beside_the_base() -> None:
    node = NodeInRun(node_id="a", state="training", base_version=7, staleness=2)
    run = RunInfo(run_id="r", name="n", state="running", created_at=0.0, nodes=[node])
    assert views.run_nodes_grid(run).rows[0][4] == "7 (-2)"


def test_names_from_other_machines_are_not_read_as_markup() -> None:
    grid = Grid(columns=("name",), rows=[("[red]x[/red] [/]",)])
    assert "[red]x[/red] [/]" in drawn(rich_table(grid))


@given(st.text())
def test_cleaned_text_is_one_printable_line(text: str) -> None:
    assert all(character.isprintable() or character == "\t" for character in clean(text))


@pytest.mark.parametrize("about", [{}, {"run_id": "r1"}, {"run_id": "r1", "node_id": "us-west"}])
def test_events_name_what_they_are_about(about: dict[str, str]) -> None:
    line = views.event_text(Event(id=1, time=0.0, kind="round.closed", text="version 3", **about))
    assert line.endswith("version 3")
    assert all(name in line for name in about.values())

"""The parts of the demo that need no processes: its folder, its job, its words."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from support.demo_report import make_report

from ciuic.errors import UsageError
from ciuic.lab.demo import DemoConfig, make_job, prepare_folder, verdict_lines, work_factor
from ciuic.lab.profiles import continents
from ciuic.lab.report import with_verdict
from ciuic.lab.screen import LiveScreen, PlainScreen, Scene, open_screen, picture
from ciuic.net.messages import EvaluationPoint, NodeInRun, RunInfo


def make_scene(progress: float = 0.4) -> Scene:
    nodes = [
        NodeInRun(node_id="us-west", state="training", step=70, loss=2.6, base_version=7, pushes_merged=7, wall_s=10.0,
                  communication_s=0.8, longest_stall_s=0.25),
        NodeInRun(node_id="ap-southeast", state="training", step=60),
    ]  # fmt: skip
    run = RunInfo(
        run_id="demo-1",
        name="demo",
        state="running",
        created_at=0.0,
        versions=[7],
        nodes=nodes,
        progress=progress,
        evaluations=[EvaluationPoint(version=4, loss=2.71828, node_id="us-west", time=1.0, samples_committed=9)],
    )
    links = {site.location: site.link for site in continents().sites}
    return Scene(run=run, links=links, killed=frozenset({"ap-southeast"}), wire_bytes=3_400_000, elapsed_s=31.0)


def test_the_job_is_the_promised_one_and_quick_is_shorter() -> None:
    job = make_job(DemoConfig(seed=7))
    assert (job.model.preset, job.nodes.min, job.train.seed) == ("deepseek-v3-tiny", 3, 7)
    assert (job.sync.codec_up, job.sync.codec_down) == ("1-bit", "1-bit")
    assert (make_job(DemoConfig(quick=True)).train.samples or 0) < (job.train.samples or 0)


@pytest.mark.parametrize(("cores", "factor"), [(1, 1.0), (2, 1.0), (3, 1.5), (4, 2.0), (64, 2.0)])
def test_there_is_more_to_do_where_each_node_has_a_core(cores: int, factor: float) -> None:
    assert work_factor(cores) == factor


def test_a_second_demo_replaces_the_first_ones_files_only(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    prepare_folder(folder)
    (folder / "state").mkdir()
    (folder / "state" / "token").write_text("old")
    (folder / "report.html").write_text("old")
    (folder / "notes.txt").write_text("mine")
    prepare_folder(folder)
    assert not (folder / "state").exists()
    assert not (folder / "report.html").exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(UsageError, match="was not made by the demo"):
        prepare_folder(tmp_path)
    assert (tmp_path / "state").exists()


def test_the_verdict_names_each_check_and_the_files(tmp_path: Path) -> None:
    lines = verdict_lines(make_report(), tmp_path)
    assert sum(line.startswith("holds  ") for line in lines) == 8
    assert make_report().verdict in lines
    assert any(str(tmp_path / "report.html") in line for line in lines)
    failed = with_verdict(msgspec.structs.replace(make_report(), samples_lost=1))
    assert sum(line.startswith("FAILS  each sample") for line in verdict_lines(failed, tmp_path)) == 1


def test_plain_lines_say_progress_but_not_at_every_look() -> None:
    out = io.StringIO()
    screen = open_screen(Console(file=out, force_terminal=False, width=80))
    assert isinstance(screen, PlainScreen)
    with screen:
        for step in range(20):
            screen.show(make_scene(step / 20))
        screen.say("kill -9 of [bold]ap-southeast[/bold]")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "version 7  held-out loss 2.718  us-west training step 70, ap-southeast killed step 60" in lines[0]
    assert lines[1] == "kill -9 of [bold]ap-southeast[/bold]", "texts of other machines are not markup"


def test_a_terminal_gets_a_table_with_links_and_states() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140)
    assert isinstance(open_screen(console), LiveScreen)
    console.print(picture(make_scene()))
    text = out.getvalue()
    for piece in ("100 Mbit/s, 2 ms", "80 Mbit/s, 160 ms", "killed", "40%", "held-out loss 2.718", "3.4 MB", "8 %"):
        assert piece in text

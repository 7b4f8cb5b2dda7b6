"""`ciuic doctor report`: what was found, again, as text, JSON and a page."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctor_page import make_folder
from support.cli_world import CliWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CliWorld]:
    made = CliWorld(tmp_path)
    yield made
    made.close()


def test_the_report_is_told_as_text_and_as_json(world: CliWorld, tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path / "run"))
    assert world.ciuic("doctor", "report", folder).stdout.startswith("CRITICAL CIUIC-F3")
    assert json.loads(world.ciuic("doctor", "report", folder, "--json").stdout)["incidents"][0]["cause"]["ranks"] == [1]


def test_the_page_lies_in_the_folder_or_where_it_is_wanted(world: CliWorld, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    assert world.ciuic("doctor", "report", str(folder), "--html").stdout.strip() == str(folder / "report.html")
    elsewhere = tmp_path / "page.html"
    assert world.ciuic("doctor", "report", str(folder), "--html", "--to", str(elsewhere)).returncode == 0
    assert elsewhere.read_text() == (folder / "report.html").read_text()


def test_a_place_for_no_page_is_refused(world: CliWorld, tmp_path: Path) -> None:
    done = world.ciuic("doctor", "report", str(make_folder(tmp_path / "run")), "--to", "x.html")
    assert done.returncode == 2
    assert "add --html" in done.stderr

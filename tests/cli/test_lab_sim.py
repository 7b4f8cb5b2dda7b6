"""`ciuic lab sim` for people and for programs."""

import json

import pytest

from ciuic.cli.main import main


def test_the_json_has_the_names_that_the_page_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "sim", "--nodes", "8", "--rounds", "3", "--seed", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["rounds_asked"], found["invariants_hold"]) == (8, 3, True)
    assert found["rounds"] >= 3
    assert found["events_per_s"] > 0
    assert found["cost_per_round_growth"] == pytest.approx(found["cost_per_round_growth"])
    assert found["samples"]["lost"] == 0
    assert all(found["invariants"].values())


def test_people_get_a_table_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "sim", "--nodes", "6", "--rounds", "3", "--no-faults", "--no-growth"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["nodes", "rounds"]
    assert lines[-1].split(maxsplit=1) == ["invariants", "all 15 hold"]


def test_a_profile_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "sim", "--nodes", "2", "--rounds", "1", "--profile", "moon"]) == 2
    assert "homogeneous, continents, flapping" in capsys.readouterr().err

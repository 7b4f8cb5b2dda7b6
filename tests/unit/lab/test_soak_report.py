"""What a person reads at the end of a soak."""

from dataclasses import replace
from pathlib import Path

from ciuic.lab.soak_report import FaultDone, Property, SoakReport, closing_lines

GOOD = Property(name="every run finishes", holds=True, detail="3 runs")
BAD = Property(name="versions never go back", holds=False, detail="soak-sync-2: [9] -> [8]")
CUT = FaultDone(number=1, at_s=12.0, kind="cut", place="n2", lasts_s=4.5)
REPORT = SoakReport(
    seed=5,
    duration_s=180.0,
    every_s=12.0,
    nodes=3,
    network="relay",
    wall_s=200.0,
    machine={},
    faults=[CUT],
    runs=[],
    growth=[],
    properties=[GOOD],
    holds=True,
)


def test_a_failure_shows_the_faults_then_the_property_and_how_to_repeat_it() -> None:
    lines = closing_lines(replace(REPORT, properties=[GOOD, BAD], holds=False), Path("soak"))
    text = "\n".join(lines)
    places = [text.index(part) for part in (CUT.line, BAD.line, GOOD.line, "once more: ")]
    assert places == sorted(places)
    assert "ciuic lab soak --seed 5 --duration 180s --every 12s --nodes 3 --relay" in text


def test_a_proof_is_short() -> None:
    lines = closing_lines(REPORT, Path("soak"))
    assert CUT.line not in lines
    assert GOOD.line in lines
    assert "once more" not in "\n".join(lines)


def test_the_numbers_can_be_read_by_programs(tmp_path: Path) -> None:
    REPORT.write(tmp_path / "soak.json")
    assert '"place": "n2"' in (tmp_path / "soak.json").read_text()

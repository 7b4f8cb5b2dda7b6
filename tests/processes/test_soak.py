"""The final proof, shortened to three minutes: runs go on while something fails every twelve seconds."""

import faulthandler
import json
import subprocess
from pathlib import Path

import pytest
from lab_world import command, living
from support.cli_world import program_environment


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_three_minutes_with_a_fault_of_every_kind_lose_nothing(tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # pytest's, which takes four minutes for a test that hangs
    folder = tmp_path / "soak"
    words = ["lab", "soak", "--duration", "180s", "--every", "12s", "--seed", "1", "--relay", "--json"]
    done = subprocess.run(
        command(*words, "--folder", str(folder)),
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads(done.stdout)
    assert [found["name"] for found in report["properties"] if not found["holds"]] == []
    assert len({fault["kind"] for fault in report["faults"]}) == 10
    assert len(report["runs"]) >= 1
    assert all(run["state"] == "finished" and run["lost"] == 0 for run in report["runs"])
    assert living(folder) == []

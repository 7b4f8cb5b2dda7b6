"""The whole demo, quick: real hub, agents and workers, one killed and back, every check measured."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that still work in the demo's folder."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


@pytest.mark.alone
@pytest.mark.timeout(420)
def test_the_quick_demo_kills_a_node_takes_it_back_and_every_check_holds(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "ciuic.cli.main", "demo", "--quick", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((folder / "report.json").read_bytes())
    assert {check["name"]: check["holds"] for check in report["checks"]} == {
        check["name"]: True for check in report["checks"]
    }
    assert report["base_digests_equal"] is True
    assert report["loss_last"] < 0.65 * report["loss_first"]
    assert report["update_wire_bytes"] <= report["ddp_fp32_ring_bytes"] / 100
    assert report["exposed_comm_share"] <= 0.15
    assert report["samples_duplicated"] == report["samples_lost"] == 0
    assert report["killed"]["node_id"] == "ap-southeast"
    assert report["rejoined_after_s"] > 0
    assert report["snapshot_wire_bytes"] > 0
    for node in report["nodes"]:
        link, measured = node["emulated"], node["measured"]
        assert link["round_trip_s"] <= measured["rtt_s"] <= link["round_trip_s"] + 0.25
    assert (folder / "report.html").stat().st_size > 1_000_000
    assert (folder / "demo.png").stat().st_size > 20_000
    assert "links are emulated" in done.stdout
    assert report["verdict"] in done.stdout
    assert left_behind(folder) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "ciuic.cli.main", "demo", "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "joined" in line:
                break
        assert len(left_behind(folder)) > 3
        demo.send_signal(number)
        rest = demo.stdout.read()
        assert demo.wait() == 130, rest
    assert "Traceback" not in rest
    assert left_behind(folder) == []

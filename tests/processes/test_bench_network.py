"""`ciuic bench sync` and `ciuic bench hub`, shortened: they run, and numbers have their names and sizes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ciuic.lab.namespaces import why_not_here

REASON = why_not_here()


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ciuic.bench", *arguments, "--json", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.skipif(bool(REASON), reason=f"the lab needs namespaces: {REASON}")
def test_sync_trains_through_a_hub_far_away(tmp_path: Path) -> None:
    short = ["--duration", "9", "--warm", "3", "--rates", "100", "--modes", "none,ours"]
    found = bench(tmp_path, "sync", *short, "--interval", "4", "--compression", "1-bit")
    modes = found["rates"]["100mbit"]
    assert modes["none"]["wire_bytes_per_token"] < 1
    assert 0.2 < found["utilisation_100mbit"] < 1.2
    assert set(modes["ours"]["pushes"]) == {"us", "eu", "ap"}
    assert all(counts["merged"] >= 1 for counts in modes["ours"]["pushes"].values())
    per_round = 2 * 3 * found["parameters"] / 8 / (3 * 4 * found["tokens_per_step"])
    assert 0.5 * per_round < modes["ours"]["wire_bytes_per_token"] < 2 * per_round
    assert (tmp_path / "sync.png").stat().st_size > 10_000


def test_hub_is_compared_with_a_bare_tls_server(tmp_path: Path) -> None:
    found = bench(tmp_path, "hub", "--quick", "--elements", "3e6")
    assert 0 < found["hub_bytes_per_core_s_over_bare_tls"] < 1
    assert found["1-bit"]["in_bytes"] == pytest.approx(2 * 5 * found["elements"] / 8, rel=0.1)
    assert found["int8"]["in_bytes"] == pytest.approx(2 * 5 * found["elements"], rel=0.05)
    assert found["int8"]["out_bytes"] == pytest.approx(found["int8"]["in_bytes"], rel=0.05)

"""`ciuic bench ddp`: the promised names, from real sockets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ciuic


def test_bench_prints_the_promised_numbers_and_every_hook(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(ciuic.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    options = ["--json", "--folder", str(tmp_path), "--ranks", "2", "--steps", "6", "--batch", "4"]
    command = [sys.executable, "-m", "ciuic.bench", "ddp", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for ranks in (3, 4, 8):
        assert 30 <= found[f"onebit_bytes_below_fp32_ring_n{ranks}"] < 32
    hooks = found["hooks"]
    assert set(hooks) == {
        "plain",
        "bf16 (torch)",
        "fp16 (torch)",
        "bf16",
        "int8",
        "int4",
        "2-bit",
        "1-bit",
        "powerSGD",
    }
    assert hooks["plain"]["bytes_below_plain"] == 1
    assert hooks["1-bit"]["bytes_below_plain"] > 25
    assert 7 < hooks["int4"]["bytes_below_plain"] < 8
    assert (tmp_path / "ddp.json").exists()

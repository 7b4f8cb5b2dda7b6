"""`ciuic doctor loss` with torchrun."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ciuic

SCRIPT = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
for step in range(4):
    if os.environ["FAULT"] and dist.get_rank() == 1:
        model[2].eval()
    wrapped(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("the program has ended")
dist.destroy_process_group()
"""


def _start(folder: Path, fault: str, options: list[str], launcher: list[str]) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ciuic.cli.main", "doctor", "loss", "--json", *options, "--"]
    command += [sys.executable, "-m", "torch.distributed.run", *launcher, str(script)]
    source = str(Path(ciuic.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": source,
        "FAULT": fault,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def _loss(folder: Path, fault: str, *options: str) -> subprocess.CompletedProcess[str]:
    process = _start(folder, fault, list(options), ["--standalone", "--nproc-per-node", "2"])
    out, errors = process.communicate(timeout=200)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@pytest.mark.parametrize(("fault", "result", "code"), [("", "equal", 0), ("eval", "differs", 7)])
def test_ranks_replay_the_batch_of_rank_0_and_the_program_ends(fault: str, result: str, code: int, tmp_path: Path):
    ended = _loss(tmp_path, fault)
    assert ended.returncode == code, ended.stderr
    said = json.loads(ended.stdout)
    assert (said["step"], said["verdict"]["result"]) == (2, result)
    if fault:
        assert (said["verdict"]["module"], said["verdict"]["ranks"]) == ("2", [1])
    assert "the program has ended" not in ended.stdout + ended.stderr


def test_a_step_that_the_program_does_not_reach_is_said(tmp_path: Path):
    ended = _loss(tmp_path, "", "--step", "50")
    assert ended.returncode == 7
    verdict = json.loads(ended.stdout)["verdict"]
    assert verdict["result"] == "unknown"
    assert "ended with exit code 0 before optimizer step 50" in verdict["cause"]


def test_ranks_of_two_launchers_report_to_the_doctor_of_the_first(tmp_path: Path):
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        here, meeting = (each.getsockname()[1] for each in (one, two))
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(meeting)]
    first = _start(tmp_path, "eval", ["--listen", f"127.0.0.1:{here}"], [*nodes, "--node-rank", "0"])
    said = first.stderr.readline()
    token = re.search(r"CIUIC_DOCTOR_TOKEN=(\S+) ciuic doctor loss --collector (\S+)", said)
    assert token is not None, said
    options = ["--collector", token[2], "--token", token[1]]
    second = _start(tmp_path, "eval", options, [*nodes, "--node-rank", "1"])
    out, errors = first.communicate(timeout=200)
    second.communicate(timeout=60)
    assert first.returncode == 7, errors
    verdict = json.loads(out)["verdict"]
    assert (verdict["module"], verdict["ranks"], verdict["world"]) == ("2", [1], 2)

"""`torchrun --rdzv-backend=ciuic`: two agents on loopback meet at the hub, and again after a worker has failed."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from hub_process import HubProcess
from rendezvous_world import join_node

import ciuic

SOURCES = Path(ciuic.__file__).parents[1]
PROJECT = SOURCES.parent / "pyproject.toml"
SCRIPT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist

marker = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1 and not marker.exists():
    marker.write_text("failed once")
    sys.exit(3)
tensor = torch.full((2,), float(rank + 1))
dist.all_reduce(tensor)
print("sum", dist.get_world_size(), tensor.tolist(), flush=True)
dist.destroy_process_group()
"""


def installed(folder: Path) -> Path:
    """What pip writes for the entry points of pyproject.toml; the tests run from the source tree."""
    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["torchrun.handlers"]
    info = folder / "ciuic-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ciuic\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[torchrun.handlers]", *lines, ""]))
    return folder


def test_two_agents_meet_at_the_hub_and_again_after_a_worker_has_failed(tmp_path: Path) -> None:
    script, marker = tmp_path / "train.py", tmp_path / "marker"
    script.write_text(SCRIPT)
    with HubProcess(tmp_path / "home") as hub:
        agents = []
        for location in ("us-west", "tokyo"):
            home = tmp_path / location
            join_node(hub, home, location)
            options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--local-addr=127.0.0.1"]
            options += ["--rdzv-backend=ciuic", f"--rdzv-endpoint=127.0.0.1:{hub.port}", "--rdzv-id=job"]
            options += ["--log-dir", str(tmp_path / f"logs-{location}"), str(script), str(marker)]
            paths = f"{SOURCES}{os.pathsep}{installed(tmp_path / f'installed-{location}')}"
            own = {"CIUIC_HOME": str(home), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "torch.distributed.run", *options]
            agents.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **own},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [agent.communicate(timeout=150)[0] for agent in agents]
    for agent, output in zip(agents, outputs, strict=True):
        assert agent.returncode == 0, output
        assert "sum 2 [3.0, 3.0]" in output
    assert marker.read_text() == "failed once"

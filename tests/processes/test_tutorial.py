"""The tutorial, typed: every command of its six steps, in its order, against real processes."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import SOURCES, wait_for

from ciuic.net.client import HubClient
from ciuic.net.messages import RunInfo

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
INSTALLATION = ("make install", "source .venv/bin/activate")
SAMPLES = 2_400
"""The tutorial's run has 16,000; fewer tell the same story."""


def commands() -> list[str]:
    """What the reader types in steps 1 to 6."""
    steps = TUTORIAL.read_text().split("## Your own program")[0]
    blocks = re.findall(r"```bash\n(.*?)```", steps, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line not in INSTALLATION]


class Reader:
    """Somebody who follows the tutorial, with a free port and a shorter job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        script = bin_folder / "ciuic"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m ciuic.cli.main "$@"\n')
        script.chmod(0o755)
        job = (ROOT / "examples" / "tiny.toml").read_text()
        (folder / "examples").mkdir()
        (folder / "examples" / "tiny.toml").write_text(re.sub(r"samples = \d+", f"samples = {SAMPLES}", job))
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        self.environment = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(SOURCES),
            "OMP_NUM_THREADS": "1",
            "CIUIC_HOME": str(folder / "home"),
        }
        self.token = ""
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def type(self, command: str) -> str:
        """One line at a prompt; what stays in the foreground goes on in the background here."""
        line = command.replace("ciuic1...", self.token).replace(":8443", f":{self.port}")
        if line.startswith("ciuic hub start"):
            line += f" --port {self.port}"
        if line.startswith("kill -9"):
            self.running[self._name_of(line)].kill()
            self.running[self._name_of(line)].wait(20)
            return ""
        if "hub start" in line or "node join" in line:
            self._start(self._name_of(line), line)
            return ""
        if line.startswith("ciuic run"):
            line = line.replace("ciuic run", "ciuic run --detach")
        done = subprocess.run(line, shell=True, cwd=self.folder, env=self.environment, capture_output=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr.decode()}"
        return done.stdout.decode()

    def _name_of(self, line: str) -> str:
        return next(name for name in ("hub start", "us-west", "eu-central") if name in line)

    def _start(self, name: str, line: str) -> None:
        with (self.folder / f"{name.replace(' ', '-')}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                f"exec env {line}", shell=True, cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )

    def client(self) -> HubClient:
        operator = self.folder / "home" / "operator"
        authority = (operator / "authority.pem").read_bytes()
        return HubClient(
            f"https://127.0.0.1:{self.port}", authority, operator / "operator.pem", operator / "operator.key"
        )

    def run(self) -> RunInfo:
        client = self.client()
        try:
            return client.call("GET", "/v1/runs/tiny-1", None, RunInfo)
        finally:
            client.close()

    def version(self) -> int:
        """0 also while a hub that was just restarted still reads its log."""
        return max(self.run().versions, default=0)

    def close(self) -> None:
        for process in reversed(self.running.values()):  # nodes first: they say goodbye to the hub
            process.terminate()
            process.wait(60)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.close()


def test_the_tutorial_works_as_it_is_typed(reader: Reader) -> None:
    killed: list[str] = []
    for command in commands():
        if command.startswith("kill -9"):
            version = wait_for(reader.version, "there is a version")
            wait_for(lambda v=version: reader.version() > v, "the run goes on before the next kill")
            killed.append(command)
        said = reader.type(command)
        if command.startswith("ciuic hub start"):
            ready = reader.folder / "hub-start.log"
            starts = 1 + len(killed)
            wait_for(lambda log=ready, n=starts: log.read_text().count("hub ready") == n, "the hub is ready")
        if "token create" in command:
            reader.token = re.search(r"^ciuic1\.\S+", said, re.MULTILINE).group()
        if command == "ciuic nodes":
            wait_for(lambda: reader.type("ciuic nodes").count("idle") == 2, "both nodes are idle")
        if command.startswith("ciuic run"):
            wait_for(lambda: reader.version() >= 2, "the run trains")
    run = wait_for(lambda: (r := reader.run()).state == "finished" and r, "the run ends well", within_s=180)
    assert len(killed) == 2
    assert (run.samples.committed, run.samples.duplicated) == (SAMPLES, 0)
    assert run.loss_consistent is True
    assert any(node.incarnation == 2 for node in run.nodes)

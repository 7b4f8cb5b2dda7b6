"""`ciuic lab` over relays: up, look, break, mend, down; and a lab that is killed leaves nothing."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab_world import command, living, wait_for
from support.cli_world import program_environment

from ciuic.errors import UsageError
from ciuic.lab.lab_state import LOCK, ask_lab, is_up


class LabFolder:
    """A folder of its own, and commands about the lab in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ciuic(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = program_environment(**environment)
        return subprocess.run(
            command("lab", *words, "--folder", str(self.folder)), env=own, capture_output=True, text=True, timeout=200
        )

    def up(self, *words: str) -> dict[str, Any]:
        done = self.ciuic("up", "--relay", "--json", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def fault(self, where: str, kind: str, value: str = "", for_s: float | None = None) -> str:
        """What `ciuic lab fault` asks of the lab, without a process for each."""
        return ask_lab(self.folder, do="fault", where=where, kind=kind, value=value, for_s=for_s)["done"]

    def places(self) -> dict[str, dict[str, str]]:
        return {row["place"]: row for row in ask_lab(self.folder, do="status")["places"]}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabFolder]:
    made = LabFolder(tmp_path / "lab")
    yield made
    if is_up(made.folder):
        done = made.ciuic("down")
        assert done.returncode == 0, done.stderr
    wait_for(lambda: not living(made.folder), "a folder without processes")


def test_a_lab_is_used_broken_mended_and_ended(lab: LabFolder) -> None:
    ready = lab.up("--nodes", "2")
    assert ready["places"] == ["hub", "us-west", "eu-central"]
    again = lab.ciuic("up", "--relay")
    assert again.returncode == 2
    assert "a lab is up in" in again.stderr
    assert str(ready["pid"]) in again.stderr

    home = program_environment(CIUIC_HOME=str(lab.folder))  # as `lab up` tells the person to do
    nodes = subprocess.run(
        [*command("nodes"), "--json"], env=home, capture_output=True, text=True, timeout=60, check=True
    )
    assert {node["location"] for node in json.loads(nodes.stdout)} == {"us-west", "eu-central"}
    status = subprocess.run(command("lab", "status"), env=home, capture_output=True, text=True, timeout=60, check=True)
    assert "to the hub" in status.stdout  # CIUIC_HOME leads to the lab, too

    assert "50 Mbit/s" in lab.places()["eu-central"]["link"]
    lab.fault("eu-central", "rate", "5M/20M")
    lab.fault("eu-central-hub", "delay", "300ms")
    lab.fault("us-west", "cut")
    places = lab.places()
    assert places["eu-central"]["link"] == "5 Mbit/s up, 20 Mbit/s down"
    assert places["eu-central"]["to the hub"] == "300 ms one way"
    assert places["us-west"]["to the hub"].endswith("CUT")
    for place in ("eu-central", "us-west"):
        lab.fault(place, "mend")
    places = lab.places()
    assert (places["eu-central"]["link"], places["eu-central"]["to the hub"]) == ("50 Mbit/s", "70 ms one way")
    assert "CUT" not in places["us-west"]["to the hub"]

    killed = lab.ciuic("fault", "us-west", "kill")
    assert killed.stdout == "kill us-west\n"
    assert lab.places()["us-west"]["process"] == "-"
    lab.fault("us-west", "start")
    lab.fault("eu-central", "stop", for_s=0.5)
    wait_for(lambda: lab.places()["eu-central"]["process"].endswith("runs"), "a node that was woken")
    before = lab.places()["hub"]["process"]
    lab.fault("hub", "hub-restart")
    assert lab.places()["hub"]["process"] != before

    down = lab.ciuic("down")
    assert "is down" in down.stdout
    assert not is_up(lab.folder)
    assert lab.ciuic("down").returncode == 5
    assert "no lab is up" in lab.ciuic("status").stderr


def test_what_a_relay_cannot_do_is_said(lab: LabFolder) -> None:
    lab.up("--bare", "--nodes", "2")
    refused: dict[tuple[Any, ...], str] = {
        ("us-west", "loss", "1%"): "a relay loses nothing",
        ("us-west-eu-central", "cut"): "over relays every place knows the hub only",
        ("mars", "cut"): "neither a place nor two places",
        ("us-west", "delay"): "delay needs a value",
        ("us-west", "burn"): "there is no fault 'burn'",
        ("us-west", "kill"): "nothing runs at us-west",
        ("us-west", "mend", "", 3.0): "mend cannot be undone",
        ("hub", "rate", "1M"): "a relay has no link of the hub's own",
    }
    for words, said in refused.items():
        with pytest.raises(UsageError, match=said):
            lab.fault(*words)
    done = lab.ciuic("fault", "us-west", "loss", "1%")
    assert done.returncode == 2
    assert "a relay loses nothing" in done.stderr


def test_exec_runs_a_command_as_the_place(lab: LabFolder) -> None:
    lab.up("--bare", "--nodes", "1")
    own = program_environment()
    line = command("lab", "exec", "--folder", str(lab.folder), "us-west", "--", "sh", "-c", "env; exit 5")
    done = subprocess.run(line, env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5, done.stderr
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("CIUIC_"))
    assert found["CIUIC_LAB_PLACE"] == "us-west"
    assert found["CIUIC_LAB_HUB"].startswith("https://127.0.0.1:")
    assert found["CIUIC_HOME"] == str(lab.folder / "nodes" / "us-west")


def test_a_lab_that_is_killed_leaves_no_process_and_another_can_begin(lab: LabFolder) -> None:
    pid = lab.up("--nodes", "1")["pid"]
    assert len(living(lab.folder)) >= 4  # hub, agent, and a guard each
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not living(lab.folder) and not psutil.pid_exists(pid), "an empty folder")
    status = lab.ciuic("status")
    assert status.returncode == 5
    assert "has ended without `ciuic lab down`" in status.stderr
    assert lab.up("--bare")["pid"] != pid


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    done = LabFolder(tmp_path).ciuic("up", "--relay")
    assert done.returncode == 2
    assert "was not made by the lab" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert not (tmp_path / LOCK).exists()

"""A whole lab over network namespaces, whose host names nothing resolves. Needs root and /dev/net/tun."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SCRIPTS
from lab_world import command, make_lab, trained, wait_for

from ciuic.lab.faults import Faults, Order
from ciuic.lab.lab import Lab
from ciuic.lab.namespaces import why_not_here
from ciuic.lab.profiles import continents, lossy, with_sites
from ciuic.lab.switch_sites import HUB
from ciuic.net.messages import NodeInfo
from ciuic.net.tokens import parse_token

REASON = why_not_here()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(bool(REASON), reason=f"the lab needs namespaces: {REASON}")]
LOOK = "import socket; print(socket.gethostname()); print(socket.getaddrinfo(socket.gethostname(), None))"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with make_lab(tmp_path_factory.mktemp("far") / "lab", with_sites(continents(), 2), namespaces=True) as made:
        made.start_all()
        yield made


def at(lab: Lab, place: str, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(lab.command(place, [sys.executable, "-c", program]), capture_output=True, text=True)


def test_host_names_are_the_places_and_do_not_resolve(lab: Lab) -> None:
    for place in (HUB, "us-west", "eu-central"):
        done = at(lab, place, LOOK)
        assert done.stdout.split() == [place]
        assert "gaierror" in done.stderr
    assert socket.gethostname() not in lab.network.places


def test_a_run_works_where_no_host_name_resolves_and_gloo_meets_through_ciuic(lab: Lab, tmp_path: Path) -> None:
    program = ["python", str(SCRIPTS / "train_and_meet.py"), str(tmp_path / "records"), "2"]
    job = {
        "name": "names",
        "model": {"command": program},
        "nodes": {"min": 2},
        "sync": {"interval": 5},
        "train": {"samples": 800},
    }
    info = trained(lab, job)
    assert info.state == "finished", info.reason
    assert (info.samples.committed, info.samples.lost) == (800, 0)
    assert {tuple(node.final_digests) for node in info.nodes} == {tuple(info.digests)}
    files = wait_for(lambda: _both(tmp_path / "records"), "what both programs say at their end")
    assert [json.loads(file.read_text()) for file in files] == [{"sum": 3.0, "size": 2}] * 2


def _both(records: Path) -> list[Path]:
    found = list(records.glob("*.met"))
    return found if len(found) == 2 else []


def test_a_node_that_is_cut_off_is_missed_and_comes_back(lab: Lab) -> None:
    faults = Faults(lab)
    client = lab.client()

    def state(place: str) -> str:
        found = client.call("GET", "/v1/nodes", None, list[NodeInfo])
        return next(node.state for node in found if node.location == place)

    try:
        wait_for(lambda: {state(place) for place in lab.sites} == {"idle"}, "nodes without work")
        faults.apply(Order(where="eu-central", kind="cut"))
        wait_for(lambda: state("eu-central") in ("suspect", "dead"), "a node that is missed")
        assert state("us-west") == "idle"
        faults.apply(Order(where="eu-central", kind="mend"))
        wait_for(lambda: state("eu-central") == "idle", "the node again")
    finally:
        client.close()
        faults.close()


def test_loss_belongs_to_links_and_adds_up_between_two_sites(tmp_path: Path) -> None:
    with make_lab(tmp_path / "lab", lossy(), namespaces=True) as made:
        paths = made.network.paths
        assert paths[frozenset({HUB, "loss-1"})].loss == 0.01
        both = paths[frozenset({"loss-0.5", "loss-1"})].loss
        assert both == pytest.approx(1 - 0.995 * 0.99)
        faults = Faults(made)
        faults.apply(Order(where="loss-0.5-loss-1", kind="loss", value="50%"))
        assert paths[frozenset({"loss-0.5", "loss-1"})].loss == 0.5
        faults.apply(Order(where="loss-0.5-loss-1", kind="mend"))
        assert paths[frozenset({"loss-0.5", "loss-1"})].loss == both


def test_a_hub_whose_host_name_resolves_nowhere_advertises_an_address_that_works(lab: Lab, tmp_path: Path) -> None:
    home = str(tmp_path / "other-hub")
    with contextlib.ExitStack() as stack:

        def start(place: str, *words: str, **environment: str) -> subprocess.Popen[str]:
            line = lab.command(place, command(*words))
            own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            process = subprocess.Popen(line, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        hub = start(HUB, "hub", "start", "--port", "9443", "--home", home)
        assert hub.stdout is not None
        assert "hub ready at https://10.77.0.1:9443 " in hub.stdout.readline()
        told = start(HUB, "hub", "token", "create", "--json", CIUIC_HOME=home).communicate(timeout=60)[0]
        token = json.loads(told)["token"]
        url = parse_token(token).url
        assert url == "https://10.77.0.1:9443"
        words = ("node", "join", url, "--location", "far", "--home", str(tmp_path / "far"))
        agent = start("us-west", *words, CIUIC_TOKEN=token)
        assert agent.stdout is not None
        assert f"node far speaks to the hub at {url}" in agent.stdout.readline()

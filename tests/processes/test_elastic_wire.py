"""Membership at both ends without torch: a real hub, real TLS, nodes by hand or with their agents."""

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hub_process import Beating, HubProcess, eventually
from hub_worker import WireWorker
from net_processes import SOURCES, AgentProcess, is_alive

from ciuic.ledger.entry import entry_from_frame
from ciuic.ledger.frame import split_frames
from ciuic.net.messages import Ok, WorkerReport
from ciuic.net.tls import client_context


def job(*, nodes: int = 1, most: int = 0, samples: int = 64, grace: str = "10 s") -> dict[str, object]:
    return {
        "name": "tiny",
        "nodes": {"min": nodes} | ({"max": most} if most else {}),
        "train": {"samples": samples},
        "fault": {"grace": grace},
        "sync": {"deadline": 3.0},
    }


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(tmp_path / "home", grace_s=2.0) as running:
        yield running


class Site:
    """A node: its agent's heartbeat by hand."""

    def __init__(self, hub: HubProcess, location: str) -> None:
        self.node = hub.join(location)
        self.report = WorkerReport()
        self.beating = Beating(self.node, lambda: self.report)

    @property
    def run_id(self) -> str:
        """Of the run that the hub wants here."""
        reply = self.beating.replies[-1] if self.beating.replies else None
        return reply.assignment.run_id if reply is not None and reply.assignment is not None else ""

    def begin(self, run_id: str) -> WireWorker:
        eventually(lambda: self.run_id == run_id)
        self.report = WorkerReport(run_id=run_id, state="running", attempt=1)
        return WireWorker(self.node, run_id)

    def ended(self) -> None:
        self.report = WorkerReport(run_id=self.report.run_id, state="finished", attempt=1, exit_code=0)


def sites(hub: HubProcess, stack: ExitStack, *places: str) -> list[Site]:
    made = [Site(hub, place) for place in places]
    for site in made:
        stack.enter_context(site.beating)
    return made


def attach(*workers: WireWorker) -> None:
    """The first ones wait for the last."""
    for worker in workers[:-1]:
        reply = worker.try_attach()
        if reply.state == "initialize":
            path = f"{worker.path}/snapshot?fragment=0&version=0"
            worker.client.send_frame(path, worker.version_0(), Ok, method="PUT")
    for worker in reversed(workers):
        worker.attach()


# ---- membership


def test_busy_node_is_not_declared_dead_because_heartbeats_live_in_the_agent(hub: HubProcess, tmp_path: Path) -> None:
    agent = AgentProcess(hub, tmp_path / "node", token=hub.token(), heartbeat_s=0.2)
    run_id = hub.submit({"name": "busy", "fault": {"grace": "3 s"}})
    pid = eventually(lambda: next(iter(agent.pids(run_id)), 0))
    began_s = time.monotonic()
    eventually(lambda: time.monotonic() - began_s > 2 * 3.0)
    assert not [event for event in hub.events() if event.kind == "node.dead"]
    assert hub.nodes()["us-west"].state == "training"
    assert is_alive(pid)
    agent.close()


def test_too_few_nodes_and_the_run_waits_saying_for_whom(hub: HubProcess) -> None:
    with ExitStack() as stack:
        (here,) = sites(hub, stack, "us-west")
        run_id = hub.submit(
            {"name": "tiny", "nodes": {"min": 2, "locations": ["us-west", "eu-central"]}, "train": {"samples": 64}}
        )
        eventually(lambda: "ready: us-west" in hub.run(run_id).reason)
        said = _ciuic(hub, "status", run_id)
        assert "1 more node of 2 needed; ready: us-west; nobody ready from eu-central" in " ".join(said.split())
        (there,) = sites(hub, stack, "eu-central")
        eventually(lambda: here.run_id == there.run_id == run_id)
        assert hub.run(run_id).reason == ""


def _ciuic(hub: HubProcess, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "CIUIC_HOME": str(hub.home), "COLUMNS": "400"}
    command = [sys.executable, "-P", "-m", "ciuic.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout


def test_dead_node_is_replaced_by_a_spare_and_the_run_goes_on(hub: HubProcess) -> None:
    with ExitStack() as stack:
        here = sites(hub, stack, "a", "b", "c")
        eventually(lambda: all(site.beating.replies for site in here))
        run_id = hub.submit(job(nodes=2, most=2, samples=200, grace="2 s"))
        eventually(lambda: sum(site.run_id == run_id for site in here) == 2)
        spare, first, lost = sorted(here, key=lambda site: site.run_id != "")
        a, b = first.begin(run_id), lost.begin(run_id)
        attach(a, b)
        assert spare.run_id == ""
        b.lease(16)
        lost.beating.__exit__()
        c = spare.begin(run_id)
        assert c.attach().incarnation == 1
        for worker in (a, c):
            worker.round()
        for worker in (a, c):
            worker.settle()
        told = {("node.dead", lost.node.node_id), ("run.node_added", spare.node.node_id)}
        eventually(lambda: told <= {(event.kind, event.node_id) for event in hub.events()})
        assert hub.run(run_id).samples.lost == 0


# ---- samples


def test_worker_that_stands_still_in_the_end_does_not_keep_the_others_from_finishing(hub: HubProcess) -> None:
    with ExitStack() as stack:
        going, still = sites(hub, stack, "a", "b")
        run_id = hub.submit(job(nodes=2, samples=64, grace="1 s"))
        a, b = going.begin(run_id), still.begin(run_id)
        attach(a, b)
        b.lease(8)  # and then it says nothing any more, although its agent does

        def a_finishes() -> bool:
            reply = a.lease()
            a.report()
            if reply.status == "granted":
                a.train(reply)
                a.push()
                a.settle()
            elif reply.status == "wait":
                time.sleep(0.1)
            return reply.status == "finished"

        eventually(a_finishes, within_s=60)
        a.finish()
        going.ended()
        eventually(lambda: hub.run(run_id).state == "finished", within_s=60)
        info = hub.run(run_id)
        assert (info.samples.committed, info.samples.duplicated, info.samples.lost) == (64, 0, 0)
        story = [event.text for event in hub.events() if event.kind == "worker.silent"]
        assert len(story) == 1
        assert "8 leased samples went back" in story[0]
        assert not [event for event in hub.events() if event.kind == "node.dead"]


# ---- messages


def test_push_whose_acknowledgement_is_lost_counts_once(hub: HubProcess) -> None:
    with ExitStack() as stack:
        first, other = sites(hub, stack, "a", "b")
        run_id = hub.submit(job(nodes=2, samples=64))
        a, b = first.begin(run_id), other.begin(run_id)
        attach(a, b)
        a.train(a.lease())
        push = a.machine.push(0, a.theta)
        line = _send(hub, a, push.to_frame())
        eventually(lambda: [x.pushes_accepted for x in hub.run(run_id).nodes if x.node_id == "a"] == [1])
        line.close()  # the answer is never read
        assert a.send(push).status == "duplicate"
        b.round()
        for worker in (a, b):
            worker.settle()
        assert a.send(push).status == "duplicate", "also after its round"
        frames = a.client.fetch(f"{a.path}/entries?fragment=0&after=0&wait_s=0")
        merged = [
            c.node for frame in split_frames(frames, "entry") for c in entry_from_frame(frame).header.contributors
        ]
        assert merged.count("a") == 1
        assert hub.run(run_id).samples.duplicated == 0


def _send(hub: HubProcess, worker: WireWorker, frame: bytes) -> http.client.HTTPSConnection:
    """The hub gets the whole request; nobody reads its answer."""
    address, folder = urlsplit(hub.url), worker.node.folder
    authority = (hub.home / "operator" / "authority.pem").read_bytes()
    context = client_context(authority, folder / "node.pem", folder / "node.key", "updates")
    connection = http.client.HTTPSConnection(str(address.hostname), address.port, context=context, timeout=30)
    connection.request("POST", f"{worker.path}/push", body=frame, headers={"Content-Type": "application/octet-stream"})
    return connection

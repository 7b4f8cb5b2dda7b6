"""One run that loses its hub, a node, a link and a disk, one after the other, and goes on. Real processes.

The tests share a run: that it survives all of it is part of what they say. Each begins with three nodes at work and
leaves three behind, so their order does not matter; the last fixture step ends the run and looks at what it made.
"""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Node, wait_for
from examples import is_soak
from training_jobs import entries, hurry, script_job, trained, without_gaps

from ciuic.lab.links import Link
from ciuic.lab.relay import LinkRelay
from ciuic.net.messages import NodeInRun

AWAY_S = 120.0 if is_soak() else 15.0
"""How long the hub is away: two minutes in a soak. The job says that it may be 5 s more."""
TOTAL = 40_000 if is_soak() else 16_000
DEADLINE_S = 2.0


class World:
    """A cluster with a run of three nodes; c reaches the hub through a relay that can be cut."""

    def __init__(self, folder: Path, cluster: Cluster, relay: LinkRelay) -> None:
        self.records, self.cluster, self.relay = folder / "records", cluster, relay
        cluster.nodes["c"] = Node(cluster, "c")
        cluster.nodes["c"].url = f"https://127.0.0.1:{relay.address[1]}"
        cluster.add_nodes("a", "b", "c")
        options = ("--batch", 4, "--step-s", 0.2)
        faults = {"grace": "6 s", "outage": f"{AWAY_S + 5:g} s"}
        sync = {"interval": 5, "deadline": DEADLINE_S, "max_staleness": 200}
        self.run = cluster.submit(
            script_job(self.records, *options, nodes=3, samples=TOTAL, sync=sync, fault=faults)
            | {"nodes": {"min": 3, "max": 3}}
        )
        self.everybody_trains()

    def everybody_trains(self, *names: str) -> None:
        """Each of them gets another push merged."""
        names = names or tuple(x.node_id for x in self.members() if x.state in ("starting", "warming", "training"))
        before = {name: self.member(name).pushes_merged for name in names}
        wait_for(
            lambda: all(self.member(name).pushes_merged > before[name] for name in names), f"work of {', '.join(names)}"
        )

    def members(self) -> list[NodeInRun]:
        return self.cluster.info(self.run).nodes or [NodeInRun(node_id=x, state="starting") for x in ("a", "b", "c")]

    def member(self, name: str) -> NodeInRun:
        return self.cluster.member(self.run, name)

    def steps(self, name: str) -> int:
        """Steps of all processes of a node, from what they wrote themselves."""
        return sum(len(file.read_text().splitlines()) for file in self.records.glob(f"{name}.*.trained"))

    def rounds_go_on_without(self, name: str, count: int = 3) -> None:
        """Some rounds close, none of which has waited for longer than the deadline and a second."""
        version = self.cluster.await_version(self.run, self.cluster.version(self.run) + 1)
        self.cluster.await_version(self.run, version + count)
        rounds = [x for x in self.cluster.info(self.run).rounds if version < x.version <= version + count]
        assert all(name not in x.nodes for x in rounds)
        interval_s = 5 * max(self.member(x).step_s for x in ("a", "b"))
        print(name, "away:", [(x.why, round(x.duration_s, 2)) for x in rounds], "interval", interval_s)
        assert max(x.duration_s for x in rounds) <= DEADLINE_S + 1 + 2 * interval_s

    def finish(self) -> None:
        hurry(self.records)
        info = self.cluster.ended(self.run)
        assert info.state == "finished", info.reason
        assert (info.samples.committed, info.samples.lost) == (TOTAL, 0)
        assert info.loss_consistent is True
        assert all(node.pushes_merged + node.pushes_rejected == node.pushes_accepted for node in info.nodes)
        assert without_gaps(entries(self.cluster, self.run)), "a push was lost"
        often = trained(self.records)
        assert len(often) == TOTAL
        assert info.samples.duplicated <= sum(often.values()) - TOTAL, "duplicates are told as they are"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("elastic")
    link = Link(name="c", up_bits_per_s=1e9, down_bits_per_s=1e9, one_way_delay_s=0.001)
    with Cluster(folder) as cluster:
        target = ("127.0.0.1", int(cluster.url.rsplit(":", 1)[1]))
        with LinkRelay(link, target) as relay:
            made = World(folder, cluster, relay)
            yield made
            made.finish()


def test_hub_away_while_nodes_train_stalls_nobody_and_loses_no_push(world: World) -> None:
    world.everybody_trains()
    cluster, names = world.cluster, [x.node_id for x in world.members() if x.state == "training"]
    before = {name: world.member(name) for name in names}
    pids = {name: cluster.nodes[name.partition("-")[0]].worker_pids() for name in names}
    troubles = ("node.dead", "worker.failed", "worker.silent", "push.rejected", "push.clipped")
    told = len(cluster.events(*troubles))
    began, steps = time.monotonic(), {name: world.steps(name) for name in names}
    cluster.hub.kill()
    middle: dict[str, int] = {}
    while (away_s := time.monotonic() - began) < AWAY_S:  # the time away is what is tested
        if away_s > 0.7 * AWAY_S and not middle:
            middle = {name: world.steps(name) for name in names}
        time.sleep(0.1)
    end = {name: world.steps(name) for name in names}
    cluster.start_hub()
    assert all(steps[name] < middle[name] < end[name] for name in names), "a node ran out of samples"
    world.everybody_trains(*names)
    for name in names:
        now = world.member(name)
        assert now.incarnation == before[name].incarnation
        assert cluster.nodes[name.partition("-")[0]].worker_pids() == pids[name]
        assert now.pushes_rejected == before[name].pushes_rejected
        assert now.longest_stall_s < AWAY_S / 3
    assert cluster.events(*troubles)[told:] == []


def test_node_that_is_stopped_and_continued_is_waited_for_at_most_the_deadline_and_goes_on(world: World) -> None:
    node, cluster = world.cluster.nodes["b"], world.cluster
    world.everybody_trains("b")
    worker, incarnation = node.worker_pid(), world.member("b").incarnation
    dead = len([x for x in cluster.events("node.dead") if x.node_id == "b"])
    node.signal_everything(signal.SIGSTOP)
    try:
        world.rounds_go_on_without("b")
        line = cluster.await_event("node.dead", "b", times=dead + 1)
        assert "leased samples went back" in line.text
    finally:
        node.signal_everything(signal.SIGCONT)
    world.everybody_trains("b")
    assert (node.worker_pid(), world.member("b").incarnation) == (worker, incarnation)
    assert cluster.await_event("node.revived", "b")


def test_node_that_is_cut_off_trains_on_and_is_a_member_again_when_the_link_is_back(world: World) -> None:
    cluster, name = world.cluster, _name_of_c(world)
    node = cluster.nodes["c"]
    world.everybody_trains(name)
    worker, incarnation = node.worker_pid(), world.member(name).incarnation
    dead = len([x for x in cluster.events("node.dead") if x.node_id == name])
    steps = world.steps(name)
    world.relay.set_down(True)
    try:
        world.rounds_go_on_without(name)
        cluster.await_event("node.dead", name, times=dead + 1)
        wait_for(lambda: world.steps(name) > steps + 10, "steps of a node that reaches nobody")
    finally:
        world.relay.set_down(False)
    world.everybody_trains(name)
    assert (node.worker_pid(), world.member(name).incarnation) == (worker, incarnation)


def _name_of_c(world: World) -> str:
    return next(x.node_id for x in reversed(world.members()) if x.node_id.startswith("c") and x.state == "training")


def test_node_that_lost_its_disk_comes_back_under_a_new_name_and_takes_the_free_place(world: World) -> None:
    cluster, name = world.cluster, _name_of_c(world)
    lost = cluster.nodes["c"]
    world.everybody_trains(name)
    stalls = {x: world.member(x).longest_stall_s for x in ("a", "b")}
    lost.kill_everything()
    shutil.rmtree(cluster.folder / "node-c")
    again = cluster.nodes["c"] = Node(cluster, "c")
    again.url = lost.url
    again.start()
    fresh = wait_for(
        lambda: next((x.node_id for x in world.members() if x.node_id > name and x.pushes_merged), ""), "a new c"
    )
    assert fresh != name
    assert world.member(name).state == "gone"
    assert cluster.await_event("run.node_added", fresh)
    for x in ("a", "b"):
        grown_s = world.member(x).longest_stall_s - stalls[x]
        assert grown_s <= DEADLINE_S + 1

"""The hub moves to another address under its old name; a node's clock is an hour wrong. Real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SOURCES, Cluster, Node, wait_for
from training_jobs import each_once, hurry, script_job

NAME, TOTAL, SKEW_S = "hub.ciuic.test", 3_200, 3600.0
ELSEWHERE = Path(__file__).parents[1] / "support" / "elsewhere"


class Moved:
    """Two nodes that know the hub by its name only; b's clock is an hour ahead."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.cluster, self.records, self.hosts = cluster, folder / "records", folder / "hosts"
        self.name_is_at("127.0.0.1")
        port = cluster.url.rsplit(":", 1)[1]
        path = {"PYTHONPATH": f"{ELSEWHERE}:{SOURCES}", "CIUIC_TEST_HOSTS": str(self.hosts)}
        for name in ("a", "b"):
            cluster.nodes[name] = Node(cluster, name)
            cluster.nodes[name].url = f"https://{NAME}:{port}"
        cluster.add_nodes("a", **path)
        cluster.add_nodes("b", **path, CIUIC_TEST_SKEW_S=str(SKEW_S))
        options = ("--batch", 4, "--step-s", 0.15)
        self.run = cluster.submit(script_job(self.records, *options, nodes=2, samples=TOTAL, fault={"grace": "15 s"}))

    def name_is_at(self, address: str) -> None:
        self.hosts.write_text(f"{NAME} {address}\n")

    def both_train(self) -> None:
        before = {name: self.cluster.member(self.run, name).pushes_merged for name in ("a", "b")}
        for name, merged in before.items():
            wait_for(lambda n=name, k=merged: self.cluster.member(self.run, n).pushes_merged > k + 1, f"work of {name}")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moved]:
    folder = tmp_path_factory.mktemp("moved")
    cluster = Cluster(folder)
    cluster.names = (NAME,)
    with cluster:
        made = Moved(folder, cluster)
        yield made
        hurry(made.records)
        info = cluster.finished(made.run)
        assert [node.incarnation for node in info.nodes] == [1, 1]
        assert info.samples.duplicated == 0
        assert each_once(made.records, TOTAL)


def test_a_clock_that_is_an_hour_wrong_changes_nothing(moved: Moved) -> None:
    moved.both_train()
    cluster = moved.cluster
    nodes = {node.node_id: node for node in cluster.node_infos()}
    assert abs(nodes["b"].measured["clock_offset_s"] + SKEW_S) < 60, "the hub's clock seen from b"
    assert nodes["b"].last_seen_s < 30
    assert cluster.events("node.dead") == []
    assert cluster.member(moved.run, "b").pushes_rejected == 0


def test_agents_and_workers_follow_the_hub_to_another_address_when_its_name_moves(moved: Moved) -> None:
    moved.both_train()
    cluster = moved.cluster
    pids = [node.worker_pids() for node in cluster.nodes.values()]
    cluster.hub.kill()
    moved.name_is_at("127.0.0.2")
    cluster.host = "127.0.0.2"
    cluster.start_hub()
    moved.both_train()
    assert [node.worker_pids() for node in cluster.nodes.values()] == pids
    wait_for(lambda: all(cluster.node_state(name) == "training" for name in ("a", "b")), "both agents at the new place")

"""Real training: a node that may be dialled gives its snapshot to one that comes later."""

from pathlib import Path

from cluster import Cluster, Node, wait_for
from training_jobs import each_once, hurry, script_job

TOTAL = 8_000
MIB = 1 << 20


def test_a_joiner_takes_its_snapshot_from_the_node_that_trains(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", direct="127.0.0.1:0")
        options = ("--width", 3300, "--batch", 4, "--step-s", 0.1)
        sync = {"interval": 20, "compression": {"up": "1-bit", "down": "1-bit"}}  # a snapshot lasts for 17 rounds
        run = cluster.submit(script_job(records, *options, nodes=1, samples=TOTAL, sync=sync, fault={"grace": "20 s"}))
        cluster.await_version(run, 1)
        cluster.nodes["b"] = Node(cluster, "b").start()
        told = cluster.await_event("snapshot.fetched", "b")
        assert told.data["from"] == "a"
        assert told.data["problem"] == ""
        assert told.data["bytes"] > MIB
        wait_for(lambda: "b took" in cluster.nodes["a"].said(), "the words of the node that gave")
        cluster.await_event("worker.attached", "b")
        hurry(records)
        cluster.finished(run)
        assert cluster.events("snapshot.refused") == []
        assert each_once(records, TOTAL)

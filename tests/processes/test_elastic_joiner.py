"""A joiner whose link is slower than the ledger grows is set aside and told why; the others do not notice."""

from pathlib import Path

from cluster import Cluster, Node, wait_for
from training_jobs import each_once, hurry, script_job

from ciuic.lab.links import Link
from ciuic.lab.relay import LinkRelay

TOTAL = 4_000


def test_joiner_that_cannot_catch_up_is_set_aside_and_told_why(tmp_path: Path) -> None:
    records = tmp_path / "records"
    link = Link(name="b", up_bits_per_s=20e6, down_bits_per_s=20e6, one_way_delay_s=0.005)
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a")
        sync = {"interval": 1, "compression": {"up": "1-bit", "down": "none"}}
        fault = {"grace": "20 s"}
        options = ("--batch", 4, "--step-s", 0.1)
        run = cluster.submit(script_job(records, *options, nodes=1, samples=TOTAL, sync=sync, fault=fault))
        cluster.await_version(run, 20)
        with LinkRelay(link, ("127.0.0.1", int(cluster.url.rsplit(":", 1)[1]))) as relay:
            cluster.nodes["b"] = joiner = Node(cluster, "b")
            joiner.url = f"https://127.0.0.1:{relay.address[1]}"
            joiner.start()
            wait_for(lambda: cluster.node_state("b"), "a heartbeat of b")
            grows = _growth_bits_per_s(cluster, run)  # while its worker imports torch
            relay.set_rate(0.6 * grows, 0.6 * grows)
            told = cluster.await_event("worker.set_aside", "b")
            assert "b cannot catch up and is set aside" in told.text
            failed = cluster.await_event("worker.failed", "b")
            assert "after 0 restarts: error[CIUIC-603]: this node cannot catch up" in failed.text
            wait_for(lambda: cluster.node_state("b") == "idle", "an idle b")
            assert joiner.agent.is_alive
            version = cluster.version(run)
            cluster.await_version(run, version + 5)
            assert [x.nodes for x in cluster.info(run).rounds][-1] == ["a"]
            assert cluster.node_state("b") == "idle", "it is not taken again"
            hurry(records)
            info = cluster.finished(run)
            assert info.samples.duplicated == 0
            assert each_once(records, TOTAL)


def _growth_bits_per_s(cluster: Cluster, run: str) -> float:
    """Of the ledger, over the latest rounds."""
    rounds = cluster.info(run).rounds[-20:]
    return 8 * sum(x.entry_bytes for x in rounds[1:]) / (rounds[-1].time - rounds[0].time)

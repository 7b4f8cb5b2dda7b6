"""Nodes with several ranks: one ledger state per node, equal parameters on every rank, weights of all ranks' tokens."""

from pathlib import Path

from cluster import Cluster, wait_for
from training_jobs import each_once, ends, entries, hurry, script_job, trained, without_gaps

BATCH = 8
INTERVAL = 5


def test_node_with_two_ranks_trains_beside_a_node_with_one(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 4_000
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("two")
        cluster.add_nodes("one", CIUIC_TEST_RANKS="1")
        options = ("--batch", BATCH, "--batch-norm", "--step-s", 0.04)
        parts = {"program": "ranks_by_node.py", "sync": {"overlap": False}}
        job = script_job(records, *options, nodes=2, ranks=2, samples=total, **parts)
        run = cluster.submit(job)
        wait_for(lambda: min((n.pushes_merged for n in cluster.info(run).nodes), default=0) > 5, "work of both")
        hurry(records)
        info = cluster.finished(run)
        found = entries(cluster, run)
        assert info.samples.duplicated == 0
        assert without_gaps(found)
        last = ends(records)
        assert [(end["node"], end["rank"]) for end in last] == [("one", 0), ("two", 0), ("two", 1)]
        assert len({end["digest"] for end in last}) == 1
        assert len(trained(records)) == total
        weights: dict[str, list[tuple[int, int]]] = {"one": [], "two": []}
        for pushed in (pushed for entry in found for pushed in entry.header.contributors):
            samples = sum(stop - start for start, stop in pushed.ranges)
            weights[pushed.node].append((pushed.tokens, samples))
        assert all(tokens == samples for tokens, samples in weights["one"])
        # a last batch of one sample is trained by both ranks
        assert all(samples <= tokens <= samples + 2 for tokens, samples in weights["two"])
        # while both had steps of the same length: later each makes steps in proportion to its speed
        paced = {node: sorted(tokens for tokens, _ in pushed[:5]) for node, pushed in weights.items()}
        usual = {node: tokens[len(tokens) // 2] for node, tokens in paced.items()}
        assert usual == {"one": INTERVAL * BATCH, "two": 2 * INTERVAL * BATCH}


def test_sigterm_drains_both_ranks_that_the_agent_started(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 4_000
    with Cluster(tmp_path) as cluster:
        (node,) = cluster.add_nodes("a")
        options = ("--batch", BATCH, "--step-s", 0.05)
        run = cluster.submit(script_job(records, *options, nodes=1, ranks=2, samples=total))
        cluster.await_version(run, 3)
        assert len(node.worker_pids()) == 2
        assert node.agent.terminate() == 0
        info = cluster.info(run)
        assert info.samples.committed == len(trained(records)) < total
        assert info.samples.lost == info.samples.duplicated == 0
        assert "drained" in cluster.await_event("worker.detached", "a").text
        assert without_gaps(entries(cluster, run))
        assert each_once(records, info.samples.committed)
        last = ends(records)
        assert [(end["rank"], end["end"]) for end in last] == [(0, "drained"), (1, "drained")]
        assert last[0]["digest"] == last[1]["digest"]

"""The parameter server through a hub: programs that only push and pull, over the protocol of a run."""

from pathlib import Path

from cluster import Cluster
from training_jobs import ends, script_job


def test_programs_push_to_a_run_and_end_with_the_hub_s_parameters(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b")
        sync = {"policy": "async", "interval": 1, "compression": "int8"}
        job = script_job(records, nodes=2, samples=160, program="push_updates.py", sync=sync)
        run = cluster.submit(job)
        info = cluster.ended(run)
        assert info.state == "finished", info.reason
        assert (info.samples.committed, info.samples.duplicated, info.samples.lost) == (160, 0, 0)
        words = ends(records)
        assert len(words) == 2
        assert all(end["same"] for end in words)
        assert info.versions[0] == sum(end["pushes"] for end in words)
        last = max(words, key=lambda end: end["version"])  # the other may have had its last samples before
        assert (last["digest"], last["version"]) == (info.digests[0], info.versions[0])
        assert all(end["largest"] < 0.9 for end in words), "the updates pull towards zero"

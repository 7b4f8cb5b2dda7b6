"""A real run with a sick node: the hub says which one, on the page and in `ciuic status`."""

from pathlib import Path

from cluster import Cluster, wait_for
from training_jobs import hurry, script_job

from ciuic.cli.views import finding_facts
from ciuic.net.messages import RunInfo


def _found(info: RunInfo, code: str) -> RunInfo | None:
    return info if any(finding.code == code for finding in info.findings) else None


def test_a_node_with_noise_for_data_and_a_base_that_changed_in_memory_are_named(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b", "c")
        options = ("--batch", 8, "--step-s", 0.03, "--hold", "--noise", "b", "--bit", "c:40")
        run = cluster.submit(script_job(records, *options, nodes=3, samples=12_000))
        info = wait_for(lambda: _found(cluster.info(run), "CIUIC-M1"), "the base of c")
        finding = next(finding for finding in info.findings if finding.code == "CIUIC-M1")
        assert (finding.nodes, finding.severity) == (["c"], "critical")
        info = wait_for(lambda: _found(cluster.info(run), "CIUIC-M4"), "the loss of b")
        assert [finding.nodes for finding in info.findings if finding.code == "CIUIC-M4"] == [["b"]]
        said = dict(finding_facts(info))
        assert "the loss of node b is" in said["warning"]
        assert {finding.code for finding in info.findings} == {"CIUIC-M1", "CIUIC-M4"}
        hurry(records)
        cluster.finished(run)


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, "--batch", 8, "--step-s", 0.03, nodes=2, samples=6_000))
        wait_for(lambda: min((n.wall_s for n in cluster.info(run).nodes), default=0) > 10, "ten seconds of training")
        assert cluster.info(run).findings == []
        hurry(records)
        assert cluster.finished(run).findings == []

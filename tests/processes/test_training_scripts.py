"""Own programs in jobs: `ciuic.join()` and `prepare` in a plain loop, on nodes that allow it, and how bad ones end."""

from pathlib import Path

import psutil
from cluster import Cluster, wait_for
from training_jobs import each_once, hurry, script_job

from ciuic.net.messages import Ok


def test_own_loop_with_loader_processes_trains_every_sample_once(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 4_000
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        options = ("--batch", 8, "--step-s", 0.01, "--workers", 2)
        run = cluster.submit(script_job(records, *options, nodes=2, samples=total))
        for node in nodes:  # the one that comes later has none yet when the other one trains
            worker = psutil.Process(node.worker_pid())
            wait_for(lambda w=worker: len(w.children()) == 2, f"loader processes of {node.name}")
        hurry(records)
        info = cluster.finished(run)
        assert info.samples.duplicated == 0
        assert {node.state for node in info.nodes} == {"done"}
        for node in nodes:
            agent = psutil.Process(node.agent.popen.pid)
            wait_for(lambda a=agent: not a.children(), f"an agent {node.name} without children")
        assert each_once(records, total)


def test_node_runs_no_code_from_jobs_unless_its_owner_allowed_it(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 4_000
    with Cluster(tmp_path) as cluster:
        allowing = cluster.add_nodes("a", "b")
        cluster.add_nodes("c", allow_code=False)
        run = cluster.submit(script_job(records, "--batch", 4, "--step-s", 0.08, nodes=3, samples=total))
        wait_for(lambda: "c: does not allow code from jobs" in cluster.info(run).reason, "a reason")
        cluster.operator.call("POST", f"/v1/runs/{run}/stop", None, Ok)

        run = cluster.submit(script_job(records, "--batch", 4, "--step-s", 0.08, nodes=2, samples=total))
        cluster.await_version(run, 2)
        changed = allowing[1]
        changed.kill_everything()
        changed.start(allow_code=False)
        failed = cluster.await_event("worker.failed", "b")
        assert "error[CIUIC-204]: this node does not run code from jobs" in failed.text
        hurry(records)
        info = cluster.finished(run)
        assert {node.node_id for node in info.nodes} == {"a", "b"}
        assert cluster.nodes["c"].run_log(run) == ""
        assert info.samples.duplicated == 0


def test_program_that_always_crashes_fails_its_run_with_its_own_words(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with Cluster(tmp_path) as cluster:
        (node,) = cluster.add_nodes("a")
        job = script_job(records, "--batch", 4, "--crash-at", 7, nodes=1, samples=4_000, fault={"restarts": 1})
        run = cluster.submit(job)
        info = cluster.ended(run)
        assert info.state == "failed"
        assert info.reason == ("the workers of all its nodes failed; first a: ValueError: no such luck at step 7")
        verdict = info.verdict
        assert verdict is not None
        assert (verdict.node_id, verdict.rank, verdict.line) == ("a", 0, "ValueError: no such luck at step 7")
        assert Path(verdict.where.partition(":")[0]).name == "train_tiny.py", verdict.where
        assert "no such luck" in Path(verdict.log).read_text()
        assert "after 1 restarts: ValueError: no such luck at step 7" in cluster.await_event("worker.failed", "a").text
        assert node.said().count("worker started as process") == 2
        assert info.samples.lost == info.samples.duplicated == 0
        assert node.agent.is_alive
        assert cluster.node_state("a") == "idle"

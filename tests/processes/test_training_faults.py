"""What fails in the field, in real runs: hubs and nodes that die, workers that stand still, numbers that explode."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
from cluster import Cluster, wait_for
from training_jobs import each_once, entries, hurry, layout, script_job, sequences, trained, without_gaps

from ciuic.codec import FragmentCodec
from ciuic.net.messages import RunInfo

STEP_S = 0.08
SLOWLY = ("--batch", 4, "--step-s", STEP_S, "--hold")
PER_NODE = 2_000
"""Samples; at that pace 40 s, longer than any test looks at the run. Then its programs hurry."""


def pushes(info: RunInfo) -> dict[str, tuple[int, int]]:
    """Accepted and merged ones by node."""
    return {node.node_id: (node.pushes_accepted, node.pushes_merged) for node in info.nodes}


def all_merged(info: RunInfo) -> bool:
    return all(accepted == merged for accepted, merged in pushes(info).values())


# ---- the hub


def test_hub_killed_in_the_middle_of_a_round_comes_back_and_no_push_is_lost(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 2 * PER_NODE
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=total, sync={"min_fraction": 1.0}))
        cluster.await_version(run, 4)
        workers = [node.worker_pid() for node in nodes]
        os.kill(workers[1], signal.SIGSTOP)  # no round can close without b
        before = wait_for(lambda: _when_a_waits(cluster.info(run)), "a push of a that waits for b")
        cluster.hub.kill()
        os.kill(workers[1], signal.SIGCONT)
        for node in nodes:
            wait_for(lambda n=node: "the hub does not answer" in n.said(), f"{node.name} without a hub")
            wait_for(lambda n=node: "trying again" in n.run_log(run), f"the worker of {node.name} without a hub")
        cluster.start_hub()
        after = wait_for(lambda: cluster.info(run), "the run on the new hub")
        assert after.versions >= before.versions
        assert pushes(after)["a"][0] >= pushes(before)["a"][0]
        cluster.await_version(run, before.versions[0] + 4)
        assert [node.worker_pid() for node in nodes] == workers
        assert all(node.agent.is_alive for node in nodes)
        hurry(records)
        info = cluster.finished(run)
        assert [node.incarnation for node in info.nodes] == [1, 1]
        assert all_merged(info)
        assert without_gaps(entries(cluster, run))
        assert info.samples.duplicated == 0
        assert each_once(records, total)


def _when_a_waits(info: RunInfo) -> RunInfo | None:
    waiting = [name for name, (accepted, merged) in pushes(info).items() if accepted > merged]
    return info if waiting == ["a"] else None


# ---- nodes


def test_node_that_loses_power_and_returns_gets_work_again_and_nobody_waits_for_it(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 3 * PER_NODE
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b", "c")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=3, samples=total))
        cluster.await_version(run, 8)
        wait_for(lambda: cluster.member(run, "c").pushes_merged, "a merged push of c")
        lost = nodes[2]
        lost.kill_everything()
        cluster.await_event("node.dead", "c")
        cluster.await_version(run, cluster.version(run) + 4)
        lost.start()
        wait_for(lambda: cluster.member(run, "c").incarnation == 2, "c in the run again")
        merged = cluster.member(run, "c").pushes_merged
        wait_for(lambda: cluster.member(run, "c").pushes_merged > merged + 1, "work of c after its return")
        survivors = [cluster.member(run, name) for name in ("a", "b")]
        hurry(records)
        info = cluster.finished(run)
        assert all_merged(info)
        assert info.samples.duplicated == 0
        assert sequences(entries(cluster, run)).keys() == {("a", 1), ("b", 1), ("c", 1), ("c", 2)}
        print({node.node_id: (node.longest_stall_s, node.step_s) for node in survivors})
        assert all(node.longest_stall_s <= 2 * STEP_S + 1 for node in survivors)
        assert len(trained(records)) == total
        assert set(trained(records, "a").values()) == set(trained(records, "b").values()) == {1}


def test_sigterm_drains_a_node_and_its_last_steps_count(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 2 * PER_NODE
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=total))
        cluster.await_version(run, 4)
        wait_for(lambda: cluster.member(run, "b").pushes_merged, "a merged push of b")
        assert nodes[1].agent.terminate() == 0
        assert cluster.node_state("b") == "left"
        assert cluster.await_event("worker.detached", "b").text.startswith("b left the run: drained")
        cluster.await_version(run, cluster.version(run) + 2)
        hurry(records)
        info = cluster.finished(run)
        assert all_merged(info)
        assert without_gaps(entries(cluster, run))
        drained = {node.node_id: node for node in info.nodes}["b"]
        assert (drained.state, drained.samples) == ("gone", sum(trained(records, "b").values()))
        assert each_once(records, total)


def test_sigterm_ends_a_node_at_once_that_waits_for_others_to_start(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(tmp_path / "records", nodes=2, samples=1_000))
        psutil.Process(nodes[1].worker_pid()).suspend()
        wait_for(lambda: "waiting for 2 nodes to start together" in nodes[0].run_log(run), "a that waits for b")
        began = time.monotonic()
        assert nodes[0].agent.terminate() == 0
        assert time.monotonic() - began < 20  # a worker that does not end is killed after 60 s
        assert cluster.node_state("a") == "left"
        assert cluster.info(run).samples.committed == 0


# ---- workers


def test_killed_worker_is_restarted_and_its_samples_are_trained_after_all(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 2 * PER_NODE
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=total))
        cluster.await_version(run, 4)
        killed = nodes[1].worker_pid()
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: cluster.member(run, "b").incarnation == 2, "b in the run again")
        assert nodes[1].worker_pid() != killed
        merged = cluster.member(run, "b").pushes_merged
        wait_for(lambda: cluster.member(run, "b").pushes_merged > merged, "work of the new worker")
        hurry(records)
        info = cluster.finished(run)
        assert "killed by SIGKILL" in nodes[1].said()
        assert all_merged(info)
        assert info.samples.duplicated == 0
        assert len(trained(records)) == total


def test_worker_that_stood_still_loses_nothing_and_the_others_go_on(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 3 * PER_NODE
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b", "c")
        sync = {"deadline": 0.5, "max_staleness": 2}
        run = cluster.submit(script_job(records, *SLOWLY, nodes=3, samples=total, sync=sync))
        cluster.await_version(run, 4)
        wait_for(lambda: cluster.member(run, "c").pushes_merged > 1, "merged pushes of c")
        worker = psutil.Process(nodes[2].worker_pid())
        worker.suspend()
        stopped_at = cluster.version(run)
        cluster.await_version(run, stopped_at + 6)
        rounds = [r for r in cluster.info(run).rounds if r.version > stopped_at + 1]
        assert rounds
        assert {tuple(r.nodes) for r in rounds} == {("a", "b")}
        assert rounds[0].why == "deadline"  # and after the grace nobody waits for it any more
        merged = cluster.member(run, "c").pushes_merged
        worker.resume()
        wait_for(lambda: cluster.member(run, "c").pushes_merged > merged + 1, "work of c again")
        hurry(records)
        info = cluster.finished(run)
        assert worker.pid in {int(file.stem.rpartition(".")[2]) for file in records.glob("c.*.end")}
        assert info.samples.duplicated == 0
        print(sequences(entries(cluster, run)), {node.node_id: node.pushes_rejected for node in info.nodes})
        assert each_once(records, total)


def test_loss_that_is_not_a_number_on_one_node_never_reaches_the_ledger(tmp_path: Path) -> None:
    records, total = tmp_path / "records", 2_400
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        job = script_job(records, "--batch", 4, "--step-s", 0.01, "--nan", "b:23", nodes=2, samples=total)
        run = cluster.submit(job)
        info = cluster.finished(run)
        assert "training produced a non-finite value in " in nodes[1].run_log(run)
        assert "training goes on from version " in nodes[1].run_log(run)
        found = entries(cluster, run)
        codec = FragmentCodec("1-bit", layout(cluster, run).fragment_shape(0))
        assert all(np.isfinite(codec.decode(entry.payload)).all() for entry in found)
        assert all_merged(info)
        assert without_gaps(found)
        assert [node.incarnation for node in info.nodes] == [1, 1]
        assert info.samples.duplicated == 0
        losses = [point.loss for point in info.evaluations]
        assert np.isfinite(losses).all()
        assert losses[-1] < losses[0]
        assert set(trained(records, "a").values()) == {1}
        assert set(trained(records, "b").values()) == {1, 2}  # what was trained into the void was trained again
        assert len(trained(records)) == total

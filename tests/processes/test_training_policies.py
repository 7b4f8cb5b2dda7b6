"""Whole runs under other policies: async, streamed fragments, a slow node, settings that change on the way."""

import os
import signal
from pathlib import Path

from cluster import Cluster, wait_for
from training_jobs import each_once, ends, entries, hurry, script_job

from ciuic.net.messages import Ok, SyncRequest


def test_a_model_streamed_in_fragments_ends_equal_on_all_nodes_with_each_sample_once(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b")
        sync = {"interval": 6, "fragments": 3, "overlap": True}
        run = cluster.submit(script_job(records, "--step-s", 0.01, nodes=2, samples=1600, sync=sync))
        info = cluster.finished(run)
        assert len(info.versions) == 3
        assert min(info.versions) >= 4
        assert info.loss_consistent is True
        assert info.samples.duplicated == 0
        assert info.samples.lost == 0
        assert len({tuple(node.final_digests) for node in info.nodes}) == 1
        assert each_once(records, 1600)
        assert len({end["digest"] for end in ends(records)}) == 1
        losses = [point.loss for point in sorted(info.evaluations, key=lambda point: point.version)]
        assert losses[-1] < losses[0] - 0.3


def test_in_async_each_push_is_an_entry_weighted_by_nodes_and_staleness(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b")
        sync = {"interval": 4, "policy": "async", "max_staleness": 50}
        run = cluster.submit(script_job(records, "--step-s", 0.05, nodes=2, samples=1600, sync=sync))
        info = cluster.finished(run)
        found = entries(cluster, run)
        assert {entry.header.why for entry in found} == {"pushed"}
        assert {len(entry.header.contributors) for entry in found} == {1}
        both = [c for entry in found for c in entry.header.contributors][4:-4]
        assert {c.node for c in both} == {"a", "b"}
        for contributor in both:
            expected = (1 + contributor.staleness) ** -0.5 / 2
            assert abs(contributor.weight - expected) < 1e-6
        assert each_once(records, 1600)
        assert info.loss_consistent is True
        losses = [point.loss for point in sorted(info.evaluations, key=lambda point: point.version)]
        assert losses[-1] < losses[0] - 0.3


def test_a_node_four_times_slower_makes_a_quarter_of_the_steps_and_nobody_waits(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b", "c")
        job = script_job(
            records, "--step-s", 0.05, "--slow", "c:4", nodes=3, samples=12_000, sync={"interval": 8, "overlap": True}
        )
        run = cluster.submit(job)

        def is_balanced() -> bool:
            nodes = {node.node_id: node for node in cluster.info(run).nodes}
            return len(nodes) == 3 and nodes["c"].interval > 0 and nodes["a"].interval >= 3 * nodes["c"].interval

        wait_for(is_balanced, "intervals in proportion to the speeds")
        wait_for(lambda: min(node.pushes_merged for node in cluster.info(run).nodes) >= 8, "eight pushes of each")
        hurry(records)
        info = cluster.finished(run)
        assert sum(node.pushes_rejected for node in info.nodes) == 0
        assert {node.pushes_accepted - node.pushes_merged for node in info.nodes} == {0}
        assert each_once(records, 12_000)


def test_settings_change_at_a_round_boundary_of_a_run_at_work(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, "--step-s", 0.02, nodes=2, samples=6400, sync={"interval": 4}))
        wait_for(lambda: max(cluster.info(run).versions, default=0) >= 3, "three rounds")
        request = SyncRequest(policy="async", interval=6, codec_up="int8", codec_down="bf16")
        cluster.operator.call("POST", f"/v1/runs/{run}/sync", request, Ok)
        wait_for(lambda: any(e.header.codec == "bf16" for e in entries(cluster, run)), "an entry in bf16")
        back = SyncRequest(policy="sync", codec_up="1-bit", codec_down="1-bit")
        cluster.operator.call("POST", f"/v1/runs/{run}/sync", back, Ok)
        seen = len(entries(cluster, run))
        wait_for(lambda: len(entries(cluster, run)) > seen + 2, "rounds in sync again")
        hurry(records)
        info = cluster.finished(run)
        found = entries(cluster, run)
        assert [e.header.codec for e in found[-2:]] == ["1-bit", "1-bit"]
        assert {"complete", "pushed"} <= {e.header.why for e in found}
        assert info.loss_consistent is True
        assert each_once(records, 6400)
        assert info.sync.startswith("sync, 1-bit, every 6 steps")


def test_gradients_of_every_step_make_the_same_step_on_all_nodes(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b")
        job = script_job(records, "--step-s", 0.05, nodes=2, samples=1920, sync={"send": "gradient", "interval": 1})
        run = cluster.submit(job)
        info = cluster.finished(run)
        found = entries(cluster, run)
        assert {e.header.codec for e in found} == {"int4"}
        assert min(e.header.step.lr for e in found[5:-1]) > 0
        assert sum(len(e.header.contributors) == 2 for e in found) > 0.25 * len(found), "one may come late"
        assert info.loss_consistent is True
        assert each_once(records, 1920)
        assert len({end["digest"] for end in ends(records)}) == 1
        losses = [point.loss for point in sorted(info.evaluations, key=lambda point: point.version)]
        assert losses[-1] < losses[0] - 0.3


def test_one_bit_adam_survives_the_death_of_a_node_and_of_the_hub(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        job = script_job(
            records,
            "--step-s",
            0.02,
            nodes=2,
            samples=6400,
            sync={"send": "gradient", "interval": 1, "deadline": 2.0},
            optim={"optimizer": "1-bit-adam"},
        )
        run = cluster.submit(job)
        cluster.await_version(run, 10)
        nodes[1].kill_everything()
        cluster.await_version(run, 25)
        nodes[1].start()
        cluster.await_event("worker.attached", "b", times=2)
        cluster.hub.kill()
        cluster.start_hub()
        wait_for(lambda: any(e.header.codec == "1-bit" for e in entries(cluster, run)), "entries of 1-bit momentum")
        hurry(records)
        info = cluster.finished(run)
        phases = [e.header.step.phase for e in entries(cluster, run)]
        assert phases == sorted(phases), "the second moment thawed"
        assert {"adam", "frozen"} == set(phases)
        assert info.loss_consistent is True
        assert info.samples.lost == 0
        losses = [point.loss for point in sorted(info.evaluations, key=lambda point: point.version)]
        assert losses[-1] < losses[0] - 0.3


def test_gradients_of_ranks_fragments_and_buffers_end_equal_also_after_one_that_was_not_finite(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b")
        sync = {"send": "gradient", "interval": 1, "fragments": 2}
        options = ("--step-s", 0.01, "--batch-norm", "--nan", "b:5")
        run = cluster.submit(script_job(records, *options, nodes=2, ranks=2, samples=1920, sync=sync))
        info = cluster.finished(run)
        assert len(info.versions) == 2
        assert info.loss_consistent is True
        assert info.samples.lost == 0
        assert len({end["digest"] for end in ends(records)}) == 1
        assert len(ends(records)) == 4


def test_a_worker_that_waits_for_a_mean_hears_that_it_shall_leave(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    with Cluster(tmp_path) as cluster:
        nodes = cluster.add_nodes("a", "b")
        sync = {"send": "gradient", "interval": 1, "deadline": "60 s"}
        job = script_job(records, "--step-s", 0.02, nodes=2, samples=64_000, sync=sync, fault={"grace": "60 s"})
        run = cluster.submit(job)
        wait_for(lambda: cluster.member(run, "b").pushes_merged, "a merged push of b: from then on it is waited for")
        os.kill(nodes[1].worker_pid(), signal.SIGSTOP)
        try:
            wait_for(
                lambda: cluster.member(run, "a").pushes_accepted > cluster.member(run, "a").pushes_merged, "a waits"
            )
            os.kill(nodes[0].worker_pid(), signal.SIGTERM)
            cluster.await_event("worker.detached", "a")
        finally:
            os.kill(nodes[1].worker_pid(), signal.SIGCONT)

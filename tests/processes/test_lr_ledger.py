"""The learning rate in a run: a function of the run's progress alone on every node, and a ramp for who joins late."""

from pathlib import Path

import pytest
from cluster import Cluster
from training_jobs import hurry, script_job

from ciuic.train.schedule import RAMP_STEPS, lr_factor

PEAK, WARMUP = 4e-3, 0.05


def rates(records: Path, node: str) -> list[tuple[float, float]]:
    """(progress, rate) of each optimizer step of a node with one process."""
    (file,) = records.glob(f"{node}.*.rates")
    pairs = [line.split() for line in file.read_text().splitlines()]
    return [(float(progress), float(rate)) for progress, rate in pairs]


def test_nodes_have_equal_rates_at_equal_versions_and_a_late_joiner_ramps(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b")
        program = {"program": "train_scheduled.py"}
        run = cluster.submit(script_job(records, "--step-s", 0.05, nodes=2, samples=6_000, **program))
        cluster.await_version(run, 3)
        cluster.add_nodes("late")
        cluster.await_event("worker.attached", "late")
        hurry(records)
        info = cluster.finished(run)
    assert info.samples.committed == 6_000
    told = {node: rates(records, node) for node in ("a", "b", "late")}
    for node in ("a", "b"):
        began_late = told[node][0][0] > 0  # it attached when the other had made rounds already
        settled = told[node][RAMP_STEPS if began_late else 0 :]
        assert all(rate == PEAK * lr_factor(progress, WARMUP) for progress, rate in settled)
        assert len({progress for progress, _ in told[node]}) > 10
    first = told["late"][:RAMP_STEPS]
    assert first[0][0] > 0
    assert [rate for _, rate in first] == pytest.approx(
        [PEAK * lr_factor(progress, WARMUP) * (step + 1) / RAMP_STEPS for step, (progress, _) in enumerate(first)]
    )
    assert all(rate == PEAK * lr_factor(progress, WARMUP) for progress, rate in told["late"][RAMP_STEPS:])


def test_program_that_ciuic_refuses_says_why_and_is_not_started_again(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with Cluster(tmp_path) as cluster:
        (node,) = cluster.add_nodes("a")
        job = script_job(records, "--wrong", nodes=1, samples=4_000, program="train_scheduled.py")
        info = cluster.ended(cluster.submit(job))
        assert info.state == "failed"
        assert "error[CIUIC-100]: DistributedCosineLR has no option x" in info.reason
        assert node.said().count("worker started as process") == 1
        log = node.run_log(cluster.runs[0])
        assert "train_scheduled.py" in log  # where in the program
        assert "next: it has steps_per_epoch" in log

"""Global metric and early stopping over real ranks: equal numbers, equal decisions, equal errors."""

from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist
from hub_process import HubProcess
from metric_ranks import SHORT_S, absent, made_terms, one_by_one, splits, stops, subgroup
from ranks import on_ranks
from rendezvous_world import Process, Talk

from ciuic.torch import GlobalEarlyStopping, GlobalMetric
from ciuic.train.exact_sum import ExactSum

SEEDS = list(range(25))


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_split_over_ranks_gives_the_bits_of_one_process(ranks: int, tmp_path: Path) -> None:
    expected = []
    for seed in SEEDS:
        total = ExactSum()
        for value, count, _ in made_terms(seed):
            total.add(value, count)
        expected.append(total.mean().hex())
    assert on_ranks(splits, tmp_path, SEEDS, ranks=ranks) == [expected] * ranks


def test_all_ranks_stop_in_the_same_evaluation_and_know_the_same_best(tmp_path: Path) -> None:
    first, second = on_ranks(stops, tmp_path)
    assert first == second
    assert [best for best, _, _, _ in first] == [True, True, False, False]
    assert [stop for _, stop, _, _ in first] == [False, False, False, True]


def test_what_goes_wrong_is_the_same_error_on_all_ranks_and_the_next_call_works(tmp_path: Path) -> None:
    first, second = on_ranks(one_by_one, tmp_path)
    assert first == second
    assert first == [
        "TrainingLoopError: early stopping: rank 0 has 0.25, rank 1 has 1.25",
        "TrainingLoopError: loss: 1 values of rank 1 are infinite or not a number",
        "TrainingLoopError: loss: no rank has a value",
        0.5,
        # made first on both ranks is `same`; that they call them the other way round makes no difference
        (2.0, 1.0),
    ]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_named_in_time(missing: int, tmp_path: Path) -> None:
    told, took_s = on_ranks(absent, tmp_path, missing)[1 - missing]
    assert told == f"RankMissingError: rank {missing} did not come to metric loss.compute within 500 ms"
    assert took_s < SHORT_S + 10.0


def test_metrics_of_groups_keep_apart(tmp_path: Path) -> None:
    assert on_ranks(subgroup, tmp_path, ranks=3) == [[0.5, 1.0], [0.5, 1.0], [2.0, 1.0]]


def test_nodes_that_met_through_the_hub_decide_together(tmp_path: Path) -> None:
    def member(pipe: Connection) -> None:
        url = "ciuic://metric?job=metric&nodes=2"
        dist.init_process_group("gloo", init_method=url, timeout=timedelta(seconds=40))
        metric, stopping = GlobalMetric(timeout_s=40.0), GlobalEarlyStopping(patience=1, timeout_s=40.0)
        told = []
        for epoch in range(3):
            metric.update(float(epoch + dist.get_rank()), 1 + dist.get_rank())
            verdict = stopping.step(metric.compute())
            told.append((verdict.best, verdict.stop, verdict.best_value))
        Talk(pipe).say(told)
        dist.destroy_process_group()

    with HubProcess(tmp_path / "home") as hub:
        crew = [Process(member, {"CIUIC_HOME": str(hub.home)}) for _ in range(2)]
        best = 2 / 3
        assert [process.hear() for process in crew] == [
            [(True, False, best), (False, True, best), (False, True, best)]
        ] * 2
        assert [process.end() for process in crew] == [0, 0]

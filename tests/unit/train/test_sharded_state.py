"""A model that FSDP2 has spread over ranks trains as one process would, and only rank 0 has theta."""

from pathlib import Path

import numpy as np
import pytest
import sharded_cases as cases
import torch
from ranks import on_ranks

STEPS = 6


@pytest.mark.parametrize("by_job", [False, True])
def test_ranks_with_parts_come_to_what_one_process_comes_to(tmp_path: Path, by_job: bool) -> None:
    expected = cases.alone("adamw", torch.float32, STEPS)
    first, second = on_ranks(cases.together, tmp_path, "adamw", torch.float32, STEPS, by_job)
    assert np.allclose(first["theta"], expected["theta"], atol=2e-5, rtol=0)
    assert np.allclose(first["losses"], expected["losses"], atol=1e-5, rtol=0)
    assert first["losses"] == second["losses"]  # an evaluation after each entry, with the same parameters
    assert first["layout"] == second["layout"] == expected["layout"]
    assert first["frozen"] == expected["frozen"]
    assert "theta" not in second
    assert first["sharded"]
    assert first["tied"]
    whole = sum(p.numel() for p in cases.Model().parameters())
    assert first["own"] + second["own"] == whole
    assert second["own"] < 0.51 * whole


def test_a_bfloat16_model_has_its_fp32_master_on_rank_0(tmp_path: Path) -> None:
    expected = cases.alone("sgd", torch.bfloat16, STEPS)
    first, second = on_ranks(cases.together, tmp_path, "sgd", torch.bfloat16, STEPS)
    assert first["layout"] == second["layout"] == expected["layout"]
    # gradients are rounded to bfloat16 on each rank before they are averaged
    assert np.abs(first["theta"] - expected["theta"]).mean() < 1e-3
    rounded = torch.from_numpy(first["theta"]).bfloat16().float().numpy()
    assert (first["theta"] != rounded).mean() > 0.9  # the masters hold what bfloat16 cannot
    assert first["losses"] == second["losses"]


def test_replicas_of_a_sharded_model_are_one_too(tmp_path: Path) -> None:
    expected = cases.alone("sgd", torch.float32, 3)
    first, _ = on_ranks(cases.together, tmp_path, "sgd", torch.float32, 3, False, True)
    assert np.allclose(first["theta"], expected["theta"], atol=2e-5, rtol=0)


def test_muon_moves_parts_as_it_moves_the_whole(tmp_path: Path) -> None:
    expected = cases.alone("muon", torch.float32, 3)
    first, _ = on_ranks(cases.together, tmp_path, "muon", torch.float32, 3)
    # torch's Newton-Schulz steps are in bfloat16; an update has an rms of about 0.2 x lr = 0.002
    assert np.abs(first["theta"] - expected["theta"]).mean() < 1e-4
    assert np.allclose(first["losses"], expected["losses"], atol=5e-3, rtol=0)


def test_all_ranks_hold_other_values_for_a_while_and_then_their_own_again(tmp_path: Path) -> None:
    first, second = on_ranks(cases.hold_and_fail, tmp_path)
    uniform = float(np.log(cases.WORDS))  # what a model of zeros says
    assert first["seen"] == pytest.approx([uniform, 1.0])
    assert second["seen"] == pytest.approx([uniform])
    assert all(first["equal"])
    assert all(second["equal"])
    assert first["after"] == second["after"] != pytest.approx(uniform, abs=1e-4)
    assert all(first["back"])  # a failed evaluation gives rank 0 its parts back without the others


def test_an_evaluation_that_only_rank_0_has_is_told_by_the_other_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(cases.rank_0_evaluates_alone, tmp_path)
    assert first == ""
    assert "on rank 0 only" in second
    assert "on every rank" in second


def test_buffers_and_counters_of_rank_0_are_the_nodes(tmp_path: Path) -> None:
    first, second = on_ranks(cases.buffers_and_counters, tmp_path)
    assert first["bias"] == second["bias"] == [1.0, 1.0, 1.0]
    assert first["counters"] == (5, 0)
    assert second["counters"] == (5, 1)


def test_a_rank_without_theta_never_holds_more_than_a_few_parameters(tmp_path: Path) -> None:
    size_mb, count = 8, 12
    first, second = on_ranks(cases.memory, tmp_path, size_mb, count)
    print(first, second)
    assert first["theta_mb"] == size_mb * count
    assert second["theta_mb"] == 0
    assert second["grown_mb"] < 4 * size_mb
    assert first["grown_mb"] < first["theta_mb"] + 4 * size_mb

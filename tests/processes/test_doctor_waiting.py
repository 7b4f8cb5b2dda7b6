"""Hangs, order of calls and stragglers, on real ranks of the zoo."""

from pathlib import Path

import pytest
from zoo.runner import run_case


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIUIC_DOCTOR_HANG_S", "1.5")  # ten usual steps, at least this


@pytest.mark.parametrize(
    ("program", "fault", "codes", "ranks"),
    [
        ("mlp_bn", "exit_early", ("CIUIC-J1",), [1]),
        ("mlp_bn", "save_with_barrier", ("CIUIC-J2",), [0]),
        ("mlp_bn", "skips_bad_batch", ("CIUIC-J2",), [1]),
        ("tiny_gpt", "other_metrics", ("CIUIC-J2",), [1]),
        ("mlp_bn", "other_order", ("CIUIC-J2",), []),
        ("mlp_bn", "shape_mismatch", ("CIUIC-J4",), []),
        ("mlp_bn", "stuck_outside", ("CIUIC-J3",), [1]),
        ("mlp_bn", "rank_stopped", ("CIUIC-J6",), [1]),
        ("mlp_bn", "rank_killed", ("CIUIC-J5",), [1]),
        ("mlp_bn", "slow_backward", ("CIUIC-L1",), [1]),
        ("mlp_bn", "slow_save", ("CIUIC-L4",), [0]),
        ("tiny_moe", "empty_expert", ("CIUIC-J2", "CIUIC-J4"), [1]),
        ("two_tower", "shape_mismatch", ("CIUIC-J4",), [1]),
        ("gan", "slow_data", ("CIUIC-L2",), [1]),
    ],
)
def test_fault_is_found_first(program: str, fault: str, codes: tuple[str, ...], ranks: list[int], tmp_path: Path):
    outcome = run_case(program, fault, folder=tmp_path)
    assert outcome.findings, [rank.error for rank in outcome.ranks]
    cause = outcome.findings[0]["cause"]
    assert cause["code"] in codes
    assert list(cause["ranks"]) == ranks


@pytest.mark.parametrize(("fault", "code"), [("stuck_outside", "CIUIC-J3"), ("slow_backward", "CIUIC-L1")])
def test_the_guilty_one_of_three_ranks_is_named(fault: str, code: str, tmp_path: Path):
    outcome = run_case("mlp_bn", fault, world=3, folder=tmp_path)
    assert [(each["cause"]["code"], list(each["cause"]["ranks"])) for each in outcome.findings][:1] == [(code, [1])]


@pytest.mark.parametrize("variant", ["join_uneven", "save_on_rank0", "evaluate_on_rank0", "early_stopping"])
def test_ranks_that_differ_on_purpose_give_no_finding(variant: str, tmp_path: Path):
    outcome = run_case("mlp_bn", variant, folder=tmp_path)
    assert outcome.is_finished
    assert outcome.findings == []

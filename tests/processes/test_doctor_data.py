"""Data, checkpoints and the launch, on two real ranks of the zoo."""

from pathlib import Path

import pytest
from zoo.runner import run_case


def _first(program: str, case: str, folder: Path) -> tuple[str, list[int]]:
    outcome = run_case(program, case, folder=folder)
    assert outcome.findings, [rank.error for rank in outcome.ranks]
    cause = outcome.findings[0]["cause"]
    return cause["code"], list(cause["ranks"])


@pytest.mark.parametrize(
    ("program", "fault", "code", "ranks"),
    [
        ("mlp_bn", "no_set_epoch", "CIUIC-H1", []),
        ("mlp_bn", "same_data", "CIUIC-H2", []),
        ("mlp_bn", "sharded_twice", "CIUIC-H3", []),
        ("mlp_bn", "shuffle_on_one_rank", "CIUIC-H8", [1]),
        ("mlp_bn", "loader_worker_dies", "CIUIC-H5", [1]),
        ("mlp_bn", "load_nothing", "CIUIC-I2", []),
        ("mlp_bn", "load_on_rank0", "CIUIC-I6", [1]),
        ("mlp_bn", "other_model", "CIUIC-K3", [1]),
        ("mlp_bn", "clock", "CIUIC-K2", [1]),
        ("resume", "resume_replays", "CIUIC-H4", []),
        ("resume", "resume_without_optimizer", "CIUIC-I1", []),
        ("resume", "resume_without_scheduler", "CIUIC-I3", []),
        ("resume", "load_into_copy", "CIUIC-I8", []),
        ("tiny_gpt", "tie_broken", "CIUIC-I4", []),
    ],
)
def test_fault_is_found_first(program: str, fault: str, code: str, ranks: list[int], tmp_path: Path) -> None:
    assert _first(program, fault, tmp_path) == (code, ranks)


@pytest.mark.parametrize(("program", "variant"), [("resume", "plain"), ("resume", "fine_tune"), ("mlp_bn", "stream")])
def test_clean_run_has_no_finding(program: str, variant: str, tmp_path: Path) -> None:
    outcome = run_case(program, variant, folder=tmp_path)
    assert outcome.is_finished
    assert outcome.findings == []

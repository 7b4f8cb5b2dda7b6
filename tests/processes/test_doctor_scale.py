"""Two real ranks with faults of scale, numbers and schedule, and their clean twins, under the doctor."""

from pathlib import Path

import pytest
from zoo.runner import run_case

from ciuic.doctor.catalogue import code_of

FAULTS = [
    ("plain_loop", "sum_not_mean", "CIUIC-E4", ()),
    ("mlp_bn", "double_reduction", "CIUIC-E3", ()),
    ("tiny_gpt", "token_imbalance", "CIUIC-E2", (1,)),
    ("tiny_gpt", "clip_on_one_rank", "CIUIC-F2", (0,)),
    ("amp", "inf_on_one_rank", "CIUIC-F3", (1,)),
    ("accelerate_loop", "scheduler_times_processes", "CIUIC-G1", ()),
    ("tiny_gpt", "scheduler_per_micro_batch", "CIUIC-G2", ()),
]


@pytest.mark.parametrize(("program", "fault", "code", "ranks"), FAULTS)
def test_a_fault_is_named_first_with_its_rank(
    program: str, fault: str, code: str, ranks: tuple[int, ...], tmp_path: Path
):
    outcome = run_case(program, fault, folder=tmp_path / "case")
    causes = [(finding["cause"]["code"], tuple(finding["cause"]["ranks"])) for finding in outcome.findings]
    assert causes[:1] == [(code, ranks)]
    assert outcome.findings[0]["cause"]["step"] <= 20


@pytest.mark.parametrize("program", ["amp", "plain_loop"])
def test_a_clean_program_has_no_finding_of_these_classes(program: str, tmp_path: Path):
    outcome = run_case(program, "plain", folder=tmp_path / "case")
    assert outcome.is_finished
    causes = [finding["cause"] for finding in outcome.findings]
    alarms = [cause for cause in causes if (cause["severity"] or code_of(cause["code"]).severity) != "note"]
    assert not [cause for cause in alarms if cause["code"][6] in "EFG"]

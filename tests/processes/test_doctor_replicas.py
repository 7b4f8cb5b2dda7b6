"""The doctor on two real ranks: gradients, optimizers, graphs, replicas. Programs of the zoo."""

import pytest
from zoo.runner import run_case

CASES = [
    ("mlp_bn", "module_forward", "CIUIC-A1", None, ""),
    ("mlp_bn", "unused_parameter", "CIUIC-A2", None, "aux"),
    ("mlp_bn", "late_layer", "CIUIC-B2", None, "head"),
    ("mlp_bn", "overwritten", "CIUIC-D4", (1,), "head.weight"),
    ("plain_loop", "partial_reduction", "CIUIC-A5", None, "norm"),
    ("two_tower", "detached", "CIUIC-C1", None, "text"),
]


@pytest.mark.parametrize(("program", "fault", "code", "ranks", "module"), CASES)
def test_a_fault_is_found_with_rank_and_module(program, fault, code, ranks, module, tmp_path):
    outcome = run_case(program, fault, folder=tmp_path / "case")
    cause = outcome.findings[0]["cause"]
    assert cause["code"] == code
    assert cause["step"] <= 20
    assert ranks is None or tuple(cause["ranks"]) == ranks
    assert not module or cause["modules"][0].startswith(module)


@pytest.mark.parametrize(("program", "variant"), [("tiny_moe", "expert_parallel"), ("local_sgd", "outer_momentum")])
def test_what_looks_like_a_fault_and_is_meant_gives_no_alarm(program, variant, tmp_path):
    outcome = run_case(program, variant, folder=tmp_path / "case")
    assert outcome.is_finished
    assert [f["cause"]["code"] for f in outcome.findings if f["cause"]["severity"] != "note"] == []


def test_losses_are_the_same_bits_with_and_without_the_doctor(tmp_path):
    runs = [run_case("mlp_bn", "plain", doctor=doctor, folder=tmp_path / str(doctor)) for doctor in (True, False)]
    assert runs[0].ranks[0].losses == runs[1].ranks[0].losses
    assert len(runs[0].ranks[0].losses) == 24

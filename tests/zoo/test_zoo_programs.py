"""The zoo itself: its catalogue is complete, every program trains, and its faults are really in it."""

import inspect
import re
from pathlib import Path

import pytest

from zoo import cluster_runner, runner, world
from zoo.catalogue import FAULTS, PROGRAMS, REPORTED, SKIPPED, pairs
from zoo.hookup import doctor_exists

PROGRAM_FILES = Path(runner.__file__).parent / "programs"
MORE_FILES = {
    "mlp_bn": (PROGRAM_FILES / "mlp_parts.py",),
    "ledger": (PROGRAM_FILES / "ledger_job.py", Path(cluster_runner.__file__)),
}
"""In which a program's cases are named, too."""


def test_every_reported_case_is_a_fault_or_is_skipped_with_a_reason() -> None:
    covered = {case for fault in FAULTS.values() for case in fault.reported}
    assert len(REPORTED) == len(set(REPORTED)) == 52
    assert covered | set(SKIPPED) == set(REPORTED)
    assert not covered & set(SKIPPED)
    assert all(len(reason) > 40 for reason in SKIPPED.values())


def test_zoo_is_as_large_as_it_should_be() -> None:
    assert len(PROGRAMS) >= 8
    assert len(pairs(clean=True)) == len(set(pairs(clean=True))) >= 40
    assert len([fault for fault in FAULTS.values() if not fault.reported]) >= 15


def test_every_fault_has_a_program_and_every_class_of_cause_has_a_fault() -> None:
    used = {case for _, case in pairs(clean=False)}
    assert used == set(FAULTS)
    assert {fault.letter for fault in FAULTS.values()} == set("ABCDEFGHIJKLM")
    for fault in FAULTS.values():
        assert fault.codes
        assert all(re.fullmatch(r"CIUIC-[A-M][1-9]", code) for code in fault.codes), fault.id
        assert fault.codes[0].startswith(f"CIUIC-{fault.letter}") or fault.id in CAUSED_ELSEWHERE, fault.id


CAUSED_ELSEWHERE = {
    "average_misses_layer": "the replicas diverge because of a partial reduction",
    "decay_differs": "the replicas diverge because of a setting",
    "uneven_batches": "the hang comes from the data",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_catalogue_and_source_name_the_same_cases(program: str) -> None:
    source = (PROGRAM_FILES / f"{program}.py").read_text()
    source += "".join(file.read_text() for file in MORE_FILES.get(program, ()))
    mishaps = inspect.getsource(world.Zoo.mishap) if ".mishap(" in source else ""
    known = PROGRAMS[program]
    for case in known.faults:
        fault = FAULTS[case]
        assert f'"{case}"' in source + mishaps or fault.env or fault.clock_offset_s, case
    for case in known.variants[1:]:
        assert f'"{case}"' in source, case
    assert known.variants[0] == "plain"
    asked = re.findall(r'zoo\.fault (?:==|!=) "(\w+)"', source)
    assert set(asked) <= set(known.faults), set(asked) - set(known.faults)
    assert set(known.modules) <= set(known.faults)


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_trains_without_a_fault(program: str, tmp_path: Path) -> None:
    outcome = runner.run_case(program, "plain", steps=5, doctor=False, folder=tmp_path)
    assert outcome.is_finished, [rank.error for rank in outcome.ranks]
    for rank in outcome.ranks:
        assert len(rank.losses) == 5
        assert all(float.fromhex(loss) < 10 for loss in rank.losses)


@pytest.mark.parametrize(
    ("program", "fault"),
    [("mlp_bn", "module_forward"), ("tiny_gpt", "no_sync_off_by_one"), ("plain_loop", "partial_reduction")],
)
def test_same_case_gives_the_same_bits_and_a_fault_gives_others(program: str, fault: str, tmp_path: Path) -> None:
    cases = ["plain", "plain", fault]
    plain, again, wrong = (
        runner.run_case(program, case, steps=6, doctor=False, folder=tmp_path / str(number))
        for number, case in enumerate(cases)
    )
    losses = [[rank.losses for rank in outcome.ranks] for outcome in (plain, again, wrong)]
    assert losses[0] == losses[1] != losses[2]


def test_what_ends_early_is_told_as_it_was(tmp_path: Path) -> None:
    killed = runner.run_case("mlp_bn", "rank_killed", steps=10, doctor=False, folder=tmp_path / "killed")
    assert killed.ranks[1].exit_code == -9
    assert killed.ranks[0].exit_code == 1
    assert "by peer" in killed.ranks[0].error
    stuck = runner.run_case("mlp_bn", "stuck_outside", steps=10, doctor=False, folder=tmp_path / "stuck", timeout_s=3)
    assert [rank.exit_code for rank in stuck.ranks] == [None, None]
    assert "mishap" in stuck.ranks[1].error, "where it was is in its log"
    assert [len(rank.losses) for rank in stuck.ranks] == [6, 6]


@pytest.mark.skipif(not doctor_exists(), reason="this installation has no doctor")
def test_doctor_at_work_changes_no_bit(tmp_path: Path) -> None:
    with_it, without = (
        runner.run_case("mlp_bn", "plain", steps=12, doctor=doctor, folder=tmp_path / str(doctor))
        for doctor in (True, False)
    )
    assert with_it.is_finished
    assert [rank.losses for rank in with_it.ranks] == [rank.losses for rank in without.ranks]
    assert with_it.findings == []


@pytest.mark.skipif(not doctor_exists(), reason="this installation has no doctor")
@pytest.mark.parametrize("case", ["other_data", "base_differs", "nan_on_one_rank"])
def test_hub_or_worker_names_the_sick_node_of_a_ledger_run(case: str, tmp_path: Path) -> None:
    outcome = runner.run_case("ledger", case, folder=tmp_path)
    causes = [incident["cause"] for incident in outcome.findings]
    assert [(cause["code"], tuple(cause["ranks"])) for cause in causes] == [(FAULTS[case].codes[0], (1,))]
    assert (causes[0]["code"] in (tmp_path / cluster_runner.STATUS).read_text()) == (FAULTS[case].letter == "M")


@pytest.mark.skipif(not doctor_exists(), reason="this installation has no doctor")
def test_a_node_that_joins_a_ledger_run_is_no_finding(tmp_path: Path) -> None:
    outcome = runner.run_case("ledger", "elastic_join", folder=tmp_path)
    assert outcome.is_finished, [rank.error for rank in outcome.ranks]
    assert [len(rank.losses) for rank in outcome.ranks[:2]] == [24, 24]
    assert len(outcome.ranks) == 3
    assert outcome.ranks[2].losses
    assert outcome.findings == []


def test_what_all_nodes_of_a_ledger_run_have_alike_has_no_rank() -> None:
    common = {"code": "CIUIC-C5", "cause": "not cleared", "step": 2, "ranks": [0], "modules": ["inner"]}
    own = {"code": "CIUIC-F5", "cause": "nan", "step": 6, "ranks": [0]}
    workers = [[{"cause": common}], [{"cause": common, "collateral": [own]}]]
    told = {"code": "CIUIC-M1", "cause": "another base", "step": 9, "ranks": [1], "modules": ["b"]}
    causes = [incident["cause"] for incident in cluster_runner.together(workers, [told])]
    found = {cause["code"]: tuple(cause["ranks"]) for cause in causes}
    assert found == {"CIUIC-M1": (1,), "CIUIC-C5": ()}, "and C5 explains F5"

"""Limits and room of a machine: each threshold from both sides, and where nothing can be looked at."""

import resource
from pathlib import Path

import pytest

from ciuic.doctor.preflight import machine
from ciuic.doctor.preflight.machine import Processors, check_threads, read_quota
from ciuic.doctor.preflight.records import Check, Report, ok, unknown, warn
from ciuic.doctor.preflight.variables import check_variables, compared_variables

MIB, GIB = 1024**2, 1024**3


@pytest.mark.parametrize(
    ("free_bytes", "result"), [(0, "fail"), (31 * MIB, "fail"), (64 * MIB, "warn"), (2 * GIB, "ok")]
)
def test_shared_memory_of_a_default_container_is_too_small_for_large_batches(free_bytes: int, result: str) -> None:
    check = machine.judge_shared_memory(free_bytes, 4 * GIB)
    assert check.result == result
    assert bool(check.next) is (result != "ok")
    assert check.values["free_bytes"] == free_bytes


def test_a_machine_without_shared_memory_could_not_be_looked_at(tmp_path: Path) -> None:
    assert machine.check_shared_memory(tmp_path / "none").result == "could-not-look"


@pytest.mark.parametrize(("limit", "result"), [(255, "fail"), (1024, "warn"), (4096, "ok"), (-1, "ok")])
def test_open_files_are_judged_by_their_limit(limit: int, result: str) -> None:
    check = machine.judge_files(limit)
    assert check.result == result
    assert ("ulimit -n" in check.next) is (result != "ok")


def test_processes_and_locked_memory_without_limit_are_fine() -> None:
    assert machine.judge_processes(resource.RLIM_INFINITY).result == "ok"
    assert machine.judge_processes(500).result == "warn"
    assert machine.judge_locked(resource.RLIM_INFINITY).result == "ok"
    assert machine.judge_locked(64 * 1024).result == "warn"


@pytest.mark.parametrize(
    ("wish", "processors", "nproc", "result", "remedy"),
    [
        ("8", Processors(usable=8), 1, "ok", ""),
        ("8", Processors(usable=8), 4, "warn", "export OMP_NUM_THREADS=2"),
        ("2", Processors(usable=8), 4, "ok", ""),
        ("", Processors(usable=8), 1, "ok", ""),
        ("", Processors(usable=8), 4, "warn", "export OMP_NUM_THREADS=2"),
        ("", Processors(usable=4), 4, "ok", ""),
        ("", Processors(usable=64, quota=2.0), 1, "warn", "export OMP_NUM_THREADS=2"),
        ("1", Processors(usable=2), 8, "warn", "start fewer processes here"),
        ("many", Processors(usable=2), 1, "fail", "give a number"),
        ("4,2", Processors(usable=8), 2, "ok", ""),
    ],
)
def test_threads_are_counted_over_all_processes_and_against_the_quota(
    wish: str, processors: Processors, nproc: int, result: str, remedy: str
) -> None:
    environment = {"OMP_NUM_THREADS": wish} if wish else {}
    check = check_threads(environment, processors, nproc)
    assert check.result == result, check.detail
    assert check.next.startswith(remedy)


@pytest.mark.parametrize(
    ("text", "quota"), [("200000 100000", 2.0), ("max 100000", None), ("", None), ("1 0", None), ("x y", None)]
)
def test_a_containers_quota_is_read_or_there_is_none(text: str, quota: float | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert read_quota(tmp_path / "cpu.max") == quota
    assert read_quota(tmp_path / "none") is None


def test_a_folder_that_cannot_be_looked_at_is_no_failure(tmp_path: Path) -> None:
    found = {check.name: check.result for check in machine.check_room(tmp_path / "none")}
    assert found["disk"] == "could-not-look"
    assert set(found) == {"disk", "temporary files", "memory"}


def test_old_slow_and_misspelt_variables_are_named_with_what_to_do() -> None:
    environment = {
        "TORCH_DISTRIBUTED_DEBUG": "verbose",
        "NCCL_BLOCKING_WAIT": "1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "0",
        "GLOO_SOCKET_IFACE": "eth0",
        "MASTER_ADDRESS": "10.0.0.1",
        "WORLD_SIZE": "4",
    }
    checks = check_variables(environment)
    told = {check.detail.split("=")[0]: (check.result, check.next) for check in checks}
    assert told["TORCH_DISTRIBUTED_DEBUG"][0] == "fail"
    assert told["NCCL_BLOCKING_WAIT is an old name"] == ("warn", "set TORCH_NCCL_BLOCKING_WAIT instead")
    assert told["CUDA_LAUNCH_BLOCKING"] == ("warn", "unset CUDA_LAUNCH_BLOCKING")
    assert told["nothing reads GLOO_SOCKET_IFACE"] == ("warn", "did you mean GLOO_SOCKET_IFNAME?")
    assert told["nothing reads MASTER_ADDRESS"] == ("warn", "did you mean MASTER_ADDR?")
    assert "WORLD_SIZE" in told
    assert len(checks) == 6


def test_usual_variables_are_fine() -> None:
    environment = {
        "OMP_NUM_THREADS": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HOME": "/",
    }
    (check,) = check_variables(environment | {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"})
    assert check.result == "ok"


def test_variables_that_may_differ_are_not_compared() -> None:
    environment = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_ALGO": "Ring",
        "NCCL_IB_HCA": "mlx5",
        "HOME": "/",
        "TORCH_X": "y" * 999,
    }
    assert compared_variables(environment) == {"NCCL_ALGO": "Ring", "TORCH_X": "y" * 200}


def test_a_report_is_as_bad_as_its_worst_line() -> None:
    lines: list[Check] = [ok("a", ""), unknown("b", ""), warn("c", "", next="n")]
    assert [Report(checks=tuple(lines[:count])).result for count in range(4)] == [
        "could-not-look",
        "ok",
        "could-not-look",
        "warn",
    ]

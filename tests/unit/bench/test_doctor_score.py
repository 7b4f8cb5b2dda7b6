"""When a fault counts as found: a hang soon after the last step, anything else within the steps of its run."""

from types import SimpleNamespace
from typing import Any

import pytest

from ciuic.bench import doctor
from ciuic.bench.doctor_score import HANG_WITHIN_S, row_of
from ciuic.doctor.rules.hang import LEAST_S

PATIENCE_S = 12.0
BEGAN_S, LAST_STEP_S = 1000.0, 1010.0


def _is_detected(*found_s: float, kind: str = "hang", last_step_s: float = LAST_STEP_S) -> bool:
    fault = SimpleNamespace(id="f", letter="J", kind=kind, codes=("CIUIC-J3",), rank=1)
    cause = {"code": "CIUIC-J3", "severity": "critical", "ranks": [1], "modules": []}
    outcome = SimpleNamespace(
        findings=[{"cause": {**cause, "found_s": each}} for each in found_s],
        began_s=BEGAN_S,
        last_step_s=last_step_s,
        seconds=1.0,
    )
    return row_of(fault, SimpleNamespace(name="p"), outcome, patience_s=PATIENCE_S).detected


def test_a_hang_is_found_within_twice_the_time_from_which_on_a_wait_is_judged() -> None:
    assert HANG_WITHIN_S == 2 * LEAST_S < PATIENCE_S
    assert _is_detected(LAST_STEP_S + HANG_WITHIN_S - 0.1)
    assert not _is_detected(LAST_STEP_S + HANG_WITHIN_S + 0.1)
    assert _is_detected(LAST_STEP_S + 60.0, LAST_STEP_S + 1.0)


def test_the_time_of_a_hang_counts_from_the_last_step_of_any_rank() -> None:
    late_s = BEGAN_S + PATIENCE_S + 1.0
    assert _is_detected(late_s)
    assert not _is_detected(late_s, last_step_s=0.0)
    assert _is_detected(BEGAN_S + PATIENCE_S - 0.1, last_step_s=0.0)


@pytest.mark.parametrize("kind", ["step", "slow", "launch", "resume"])
def test_what_is_no_hang_is_in_time_when_it_is_found_in_its_run(kind: str) -> None:
    assert _is_detected(LAST_STEP_S + 60.0, kind=kind)
    assert not _is_detected(kind=kind)


def test_a_run_has_no_more_steps_than_those_within_which_its_fault_is_to_be_found(tmp_path: Any) -> None:
    asked: list[int] = []

    def run_case(*_: Any, steps: int, **__: Any) -> Any:
        asked.append(steps)
        return SimpleNamespace(findings=[], began_s=0.0, last_step_s=0.0, seconds=0.0)

    fault = SimpleNamespace(id="f", letter="J", kind="step", codes=("CIUIC-J3",), rank=None, steps=17)
    zoo = SimpleNamespace(
        faults={"f": fault}, programs={"p": SimpleNamespace(name="p")}, run_case=run_case, patience_s=PATIENCE_S
    )
    assert not doctor._fault(zoo, "p", "f", tmp_path).detected
    assert asked == [17]

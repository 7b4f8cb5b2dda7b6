"""What torch's own words are taken for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ciuic.bench.doctor_baselines import PATIENCE_S, by_tool, first_line, torch_says
from ciuic.bench.doctor_recorder import read_verdict
from ciuic.bench.doctor_score import Row, alarms, row_of, shares
from ciuic.bench.doctor_tools import FIXES, fixed, tools

EXAMPLES = Path(__file__).parents[3] / "examples" / "doctor"
CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:2959"
WARNED = "UserWarning: Detected call of `lr_scheduler.step()`"
LATE = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


class OneCase:
    """A zoo with one fault, whose ranks have printed something."""

    def __init__(self, printed: list[str], codes: list[int | None], *, wall_s: float = 0.3) -> None:
        self.faults = {"f": SimpleNamespace(letter="A", kind="step", rank=1)}
        self.programs = {"p": SimpleNamespace(module_of=lambda _: "body.head")}
        self._printed, self._codes, self._wall_s = printed, codes, wall_s

    def run_plain(self, program: str, fault: str, *, steps: int, patience_s: float, folder: Path) -> Any:
        for rank, text in enumerate(self._printed):
            (folder / f"rank-0-{rank}.log").write_text("".join(f"[rank{rank}]: {x}\n" for x in text.splitlines()))
        return SimpleNamespace(ranks=[SimpleNamespace(exit_code=c, wall_s=self._wall_s) for c in self._codes])


@pytest.mark.parametrize(
    ("printed", "codes", "wall_s", "how", "rank", "module"),
    [
        (["", ""], [0, 0], 0.3, "silent", False, False),
        ([CLOSED, "ValueError: bad sample"], [1, 1], 0.3, "error", True, False),
        ([CLOSED, ""], [1, 0], 0.3, "error", False, False),
        (["RuntimeError: rank 1 has inconsistent params in body.head", CLOSED], [1, 1], 0.3, "error", True, True),
        (["ValueError: mine", "ValueError: mine"], [1, 1], 0.3, "error", False, False),
        ([LATE, LATE], [1, 1], PATIENCE_S + 0.1, "time-out", False, False),
        (["", ""], [None, None], 20.0, "time-out", False, False),
        (["FutureWarning: this will go", WARNED], [0, 0], 0.3, "error", False, False),
    ],
)
def test_silence_errors_and_time_outs_are_told_apart(
    printed: list[str], codes: list[int | None], wall_s: float, how: str, rank: bool, module: bool, tmp_path: Path
) -> None:
    said = torch_says(OneCase(printed, codes, wall_s=wall_s), "p", "f", tmp_path, steps=20)
    assert (said.how, said.rank_named, said.module_named) == (how, rank, module)


def test_the_line_that_speaks_of_this_run_is_taken() -> None:
    text = "W1201 something\n/x.py:3: FutureWarning: old\nTraceback (last):\n  File x\ntorch.OutOfMemoryError: no\n"
    assert first_line(text) == "torch.OutOfMemoryError: no"
    assert first_line("all is well\nno error here") == ""


MISMATCH = "error msg: Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'all_reduce'"


@pytest.mark.parametrize(
    ("said", "code", "named", "right"),
    [
        (MISMATCH, 0, ["COLLECTIVE_TYPE_MISMATCH"], True),
        ("Collective 7: missing ranks: {1}", 0, ["MISSING_RANKS"], True),
        ("AssertionError: Missing dump files from ranks {0, 1}", 1, ["MISSING_RANKS"], False),
        ("KeyError: ('0', 0)", 1, [], False),
        ("", 0, [], False),
    ],
)
def test_the_analyser_s_words(said: str, code: int, named: list[str], right: bool) -> None:
    verdict = read_verdict(said, code, 1)
    assert (verdict["named"], verdict["rank_right"]) == (named, right)
    assert bool(verdict["problem"]) == bool(code)


def test_each_tool_is_judged_on_the_faults_that_it_can_see(tmp_path: Path) -> None:
    said = [torch_says(OneCase(["", ""], [0, 0]), "p", "f", tmp_path, steps=20)]
    doctor = {"faults": 1, "detected": 1.0, "cause_top1": 1.0, "rank_right": 1.0, "module_right": 1.0}
    rows = {row["tool"]: row for row in by_tool(said, doctor)}
    assert rows["torch alone"]["detected"] == 0.0
    assert rows["ciuic doctor"]["faults"] == 1
    assert rows["Flight Recorder and torch's analyser"]["detected"] is None


@pytest.mark.parametrize("script", FIXES)
def test_the_twin_of_each_script_has_its_fix(script: str) -> None:
    text = fixed(EXAMPLES, script)
    assert text != (EXAMPLES / f"{script}.py").read_text()
    compile(text, script, "exec")


def test_tools_that_are_not_there_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = tools(EXAMPLES, tmp_path, "")
    assert found["traincheck"]["problem"] == "not installed (pip install traincheck)"
    assert found["traceml"]["problem"] == "not installed (pip install traceml-ai)"


# ---- the doctor's own score ------------------------------------------------------------------------------------------


def _cause(code: str, *, severity: str | None = None, **more: Any) -> dict[str, Any]:
    return {"cause": {"code": code, "severity": severity, "ranks": [1], "modules": ["body"], "found_s": 103.0, **more}}


def _row(*causes: dict[str, Any], kind: str = "step", codes: tuple[str, ...] = ("CIUIC-A1",)) -> Row:
    fault = SimpleNamespace(id="f", letter="A", kind=kind, codes=codes, rank=1)
    program = SimpleNamespace(name="p", module_of=lambda _: "body.head")
    outcome = SimpleNamespace(findings=list(causes), began_s=100.0, last_step_s=0.0, seconds=1.0)
    return row_of(fault, program, outcome, patience_s=5.0)


def test_a_row_is_right_when_cause_rank_and_module_are() -> None:
    row = _row(_cause("CIUIC-A1"))
    assert (row.detected, row.top1, row.top3, row.rank_right, row.module_right) == (True,) * 5
    second = _row(_cause("CIUIC-D1"), _cause("CIUIC-A1"))
    assert (second.top1, second.top3) == (False, True)
    wrong = _row(_cause("CIUIC-A1", ranks=[0], modules=["tail"]))
    assert (wrong.rank_right, wrong.module_right) == (False, False)


def test_notes_are_no_detection_and_a_hang_must_be_named_before_its_time_out() -> None:
    assert not _row(_cause("CIUIC-A1", severity="note")).detected
    assert alarms([_cause("CIUIC-A1", severity="note"), _cause("CIUIC-A1")]) == [_cause("CIUIC-A1")]
    assert _row(_cause("CIUIC-A1"), kind="hang").detected
    assert not _row(_cause("CIUIC-A1", found_s=106.0), kind="hang").detected


def test_shares_count_only_rows_to_which_they_apply() -> None:
    found = shares([_row(_cause("CIUIC-A1")), _row()])
    assert found["detected"] == 0.5
    assert found["rank_right"] == 0.5

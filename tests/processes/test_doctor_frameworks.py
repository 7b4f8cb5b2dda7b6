"""The doctor's callbacks in the real frameworks: a fault is named, a clean run is silent."""

from pathlib import Path
from typing import Any

import pytest
from zoo.runner import _circumstances, _zygote

from ciuic.doctor.evidence import read_findings
from ciuic.doctor.incidents import severity_of

NEEDS = {"hf_trainer": "transformers", "accelerate_loop": "accelerate", "lightning_module": "lightning"}


def _run(program: str, folder: Path, *, fault: str = "", env: dict[str, str] | None = None) -> list[Any]:
    """What was found in 24 steps on two ranks."""
    folder.mkdir(exist_ok=True)
    request = {
        "program": "watched",
        "needs": [NEEDS[program], f"zoo.programs.{program}"],
        "fault": fault,
        "variant": "" if fault else "plain",
        "steps": 24,
        "world": 2,
        "generation": 0,
        "patience_s": 20.0,
        "timeout_s": 90.0,
        "folder": str(folder),
        "doctor": None,
        **_circumstances(None),
        "env": {"CIUIC_TEST_WATCHED": program, **(env or {})},
    }
    end = _zygote().ask(request)
    said = "".join((folder / f"rank-0-{rank}.log").read_text()[-3000:] for rank in range(2))
    assert [rank["exit"] for rank in end["ranks"]] == [0, 0], said
    found = read_findings(folder / "doctor")[0]
    assert (folder / "told-0.txt").read_text().split() == [incident.cause.code for incident in found]
    assert (folder / "told-1.txt").read_text() == ""
    return found


@pytest.mark.parametrize(
    ("program", "fault", "code", "ranks", "module"),
    [
        ("hf_trainer", "overwritten", "CIUIC-D4", (1,), "transformer.ln_f"),
        ("hf_trainer", "module_forward", "CIUIC-A1", None, ""),
        ("lightning_module", "overwritten", "CIUIC-D4", (1,), "head.bias"),
        ("accelerate_loop", "module_forward", "CIUIC-A1", None, ""),
    ],
)
def test_a_callback_names_the_fault(program: str, fault: str, code: str, ranks: Any, module: str, tmp_path: Path):
    found = _run(program, tmp_path, fault=fault)
    assert found[0].cause.code == code
    assert ranks is None or found[0].cause.ranks == ranks
    assert not module or found[0].cause.modules[0].startswith(module)


@pytest.mark.parametrize("program", NEEDS)
def test_a_clean_run_with_a_callback_is_silent(program: str, tmp_path: Path):
    found = _run(program, tmp_path)
    assert [i.cause.code for i in found if severity_of(i.cause) != "note"] == []


def test_a_callback_that_is_added_after_the_trainer_was_built_finds_the_wrapper(tmp_path: Path):
    found = _run("hf_trainer", tmp_path, fault="module_forward", env={"CIUIC_TEST_LATE": "1"})
    assert found[0].cause.code == "CIUIC-A1"

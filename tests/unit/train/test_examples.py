import logging
import runpy
from pathlib import Path

import pytest
import torch
from support.local_run import LocalRun

import ciuic
from ciuic.job import load_job

torch.set_num_threads(1)
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_example_job_is_valid_and_named_in_the_readme(path: Path) -> None:
    assert load_job(path).nodes.min == 2
    assert path.name in (EXAMPLES / "README.md").read_text()


def test_own_script_is_a_loop_that_learns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run = LocalRun(load_job(EXAMPLES / "own_script.toml"), total_steps=60)
    monkeypatch.setitem(vars(ciuic), "join", lambda: run)
    with caplog.at_level(logging.INFO):
        runpy.run_path(str(EXAMPLES / "own_script.py"), run_name="__main__")
    assert run.evaluate is not None
    loss, samples = run.evaluate()
    assert samples == 64
    assert loss < 3.6
    assert caplog.records[0].getMessage().startswith("step 0  loss 5.")

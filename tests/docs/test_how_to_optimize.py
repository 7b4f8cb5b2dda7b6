"""The programs and jobs of the pages on learning rates and on Muon run as they are printed."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ciuic.job import parse_job
from ciuic.train.lr import DistributedCosineLR

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
torch.set_num_threads(1)


def snippets(page: str, language: str = "python") -> list[str]:
    text = (HOW_TO / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run(snippet: str, **names: Any) -> dict[str, Any]:
    exec(compile(snippet, "how-to", "exec"), names)
    return names


@pytest.mark.parametrize("number", range(6))
def test_each_program_about_the_learning_rate_runs(number: int) -> None:
    model = nn.Linear(8, 1)
    found = snippets("learning-rate.md")
    assert len(found) == 6
    optimizer = torch.optim.Adam(model.parameters())
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": DistributedCosineLR(optimizer),
        "DistributedCosineLR": DistributedCosineLR,
        "loader": torch.randn(10, 4, 8),
        "accumulate": 3,
        "loss_of": lambda model, batch: model(batch).square().mean(),
    }
    made = run(found[number], **names)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    if number != 5:
        assert isinstance(made["scheduler"], DistributedCosineLR)


def test_the_program_and_the_job_about_muon_say_the_same() -> None:
    (program,) = snippets("muon.md")
    made = run(program, model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    (table,) = snippets("muon.md", "toml")
    optim = parse_job(tomllib.loads(table)).optim
    rates = {group["algorithm"]: group["lr"] for group in made["optimizer"].param_groups}
    assert rates == {"Muon": optim.muon_lr, "AdamW": optim.lr}

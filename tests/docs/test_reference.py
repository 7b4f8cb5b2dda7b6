"""The reference pages say what the code says."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.job_table import rows, sections

import ciuic
from ciuic.cli.main import app
from ciuic.errors import all_error_classes
from ciuic.job import load_job, parse_job

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def command_names(group: Any, prefix: str = "ciuic") -> list[str]:
    names = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            names += command_names(command, f"{prefix} {name}")
        else:
            names.append(f"{prefix} {name}")
    return names


@pytest.mark.parametrize("name", sections())
def test_the_job_page_has_every_field_with_its_default(name: str) -> None:
    text = (REFERENCE / "job.md").read_text()
    part = text.partition(f"## [{name}]\n")[2].partition("\n## ")[0]
    shown = [line for line in part.splitlines() if line.startswith("| `")]
    assert shown == rows(sections()[name])


def test_the_job_of_the_job_page_is_valid() -> None:
    (example,) = fenced(REFERENCE / "job.md", "toml")
    assert parse_job(tomllib.loads(example)).name == "ds-mini"


def test_the_cli_page_has_every_command() -> None:
    text = (REFERENCE / "cli.md").read_text()
    names = command_names(typer.main.get_command(app))
    assert len(names) > 15
    assert [name for name in names if not re.search(rf"`{name}[ `]", text)] == []


def test_the_cli_page_has_every_exit_code() -> None:
    text = (REFERENCE / "cli.md").read_text()
    for code in {0, 130} | {kind.exit_code for kind in all_error_classes()}:
        assert f"\n| {code} | " in text


def test_the_python_page_has_every_public_name() -> None:
    text = (REFERENCE / "python.md").read_text()
    assert [name for name in ciuic.__all__ if f"`ciuic.{name}" not in text] == []


def test_the_job_snippet_of_the_python_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = fenced(REFERENCE / "python.md", "python")[-1]
    (tmp_path / "job.toml").write_text('name = "x"\n')
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(snippet, "python.md", "exec"), names)
    assert names["job"] == load_job(tmp_path / "job.toml")

"""The page about nodes says what the code says."""

import ast
import re
import tomllib
from pathlib import Path

import typer.main

from ciuic.cli.main import app
from ciuic.hub.membership.selection import requirements_of
from ciuic.job import Requirements, parse_job
from ciuic.network import CiuicNodeNetwork, ScheduledRun
from ciuic.network_handles import NetworkNode

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "nodes.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_jobs_of_the_page_are_valid() -> None:
    first, second = (parse_job(tomllib.loads(text)) for text in fenced("toml"))
    assert first.name == "choosy"
    assert len(requirements_of(first)) == 7
    assert second.nodes.replace_after_s == 300


def test_every_requirement_is_named() -> None:
    assert [key for key in Requirements.model_fields if f"`{key}`" not in PAGE] == []


def test_every_command_of_the_page_exists() -> None:
    root = typer.main.get_command(app)
    named = set(
        re.findall(
            r"ciuic ((?:nodes?|plan|status|events)(?: (?:show|measure|links|check|drain|leave|evict|join))?)", PAGE
        )
    )
    assert len(named) > 8
    for words in named:
        group = root
        for word in words.split():
            group = group.commands[word]


def test_the_python_of_the_page_uses_names_that_exist() -> None:
    (program,) = fenced("python")
    owners = {"network": CiuicNodeNetwork, "node": NetworkNode, "run": ScheduledRun}
    used = [
        (each.value.id, each.attr)
        for each in ast.walk(ast.parse(program))
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)
    ]
    assert len(used) >= 7
    assert [pair for pair in used if not hasattr(owners[pair[0]], pair[1])] == []

"""The page of worked examples shows the scripts as they are, and what the doctor says of them today."""

import re
from pathlib import Path

import pytest
from doctor_example import EXAMPLES, run_example

from ciuic.doctor.report.text import report_lines

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "doctor-cases.md").read_text()
NAMES = re.findall(r"<!-- show (\w+) -->", PAGE)
AGAIN = "run `python examples/doctor/show.py --write docs/explanation/doctor-cases.md`"


def part(name: str) -> str:
    """What the page shows of an example."""
    return PAGE.partition(f"<!-- show {name} -->")[2].partition(f"<!-- end of {name} -->")[0]


def findings(text: str) -> list[str]:
    """Head, cause, where and fix of what was found, as sentences."""
    fields = re.split(r"\n(?=  [a-z]+ {2,}|[A-Z]+ CIUIC)", text.strip())
    sentences = [re.sub(r"\s+", " ", field).strip() for field in fields]
    return [each for each in sentences if re.match(r"[A-Z]+ CIUIC|cause|where|fix", each)]


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/how-to/doctor.md"])
def test_other_pages_show_the_same_output(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text()
    pattern = r"^```console\n(\$ ciuic doctor run -- torchrun.*?)^```$"
    (shown,) = re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL)
    assert shown in PAGE


def test_the_page_shows_every_example_of_the_folder_once() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "show")
    assert len(NAMES) == 8


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_shown_as_it_is(name: str) -> None:
    assert f"\n{(EXAMPLES / f'{name}.py').read_text().rstrip()}\n```" in part(name), AGAIN


@pytest.mark.parametrize("name", NAMES)
def test_torch_says_nothing_of_the_fault(name: str) -> None:
    said = part(name).split("```console")[1].split("```")[0].splitlines()[2:]
    assert [line for line in said if not line.startswith("step ")] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_doctor_says_what_the_page_shows(name: str, tmp_path: Path) -> None:
    shown = part(name).split("```console")[2].split("```")[0].split("\n", 2)[2]
    incidents = run_example(f"{name}.py", tmp_path, starts=2 if "a second time" in part(name) else 1)
    assert findings("\n".join(report_lines(incidents, []))) == findings(shown), AGAIN
    assert len(findings(shown)) == 4

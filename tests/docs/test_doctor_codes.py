"""The doctor's pages are made from its catalogue, and every entry says what a person needs."""

import re
from pathlib import Path

import pytest

from ciuic.doctor.catalogue import CLASSES, codes
from ciuic.doctor.report.pages import page, with_list
from ciuic.errors import NotFoundError

FOLDER = Path(__file__).parents[2] / "docs" / "codes"
AGAIN = "run `python -m ciuic.doctor.report.pages docs/codes`"


@pytest.mark.parametrize("code", list(codes()))
def test_the_page_of_a_code_is_what_the_catalogue_says(code: str) -> None:
    path = FOLDER / f"{code}.md"
    assert path.is_file(), AGAIN
    assert path.read_text() == page(codes()[code], links=True), AGAIN


def test_the_index_lists_what_the_catalogue_has() -> None:
    text = (FOLDER / "index.md").read_text()
    assert text == with_list(text), AGAIN


def test_an_index_without_a_place_for_the_list_is_refused() -> None:
    with pytest.raises(NotFoundError, match="no place"):
        with_list("# Error codes\n")


def test_every_class_has_an_entry() -> None:
    assert {code.removeprefix("CIUIC-")[0] for code in codes()} == set(CLASSES)


@pytest.mark.parametrize("code", list(codes()))
def test_an_entry_has_an_example_and_a_fix_of_one_line(code: str) -> None:
    entry = codes()[code]
    assert entry.example
    assert "\n" not in entry.fix
    assert not re.search(r"\s{2,}", entry.meaning + entry.detection)
    assert entry.example.count("```") % 2 == 0
    assert entry.fixes.count("```") % 2 == 0


@pytest.mark.parametrize("code", list(codes()))
def test_an_entry_folds_only_codes_that_exist(code: str) -> None:
    assert [other for other in codes()[code].explains if other not in codes()] == []

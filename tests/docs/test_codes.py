"""Each error code has a page that explains it, and each page has a code."""

import re
from pathlib import Path

import pytest

from ciuic.doctor.catalogue import codes
from ciuic.errors import all_error_classes

CODES = Path(__file__).parents[2] / "docs" / "codes"
KINDS = all_error_classes()
HEADINGS = ("## What it means", "## Why it happens", "## How to fix")


def test_codes_are_unique_and_well_formed() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"CIUIC-\d{3}", code) for code in codes)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_an_error_has_a_page_with_every_part(kind: type) -> None:
    page = CODES / f"{kind.code}.md"
    assert page.is_file(), f"{kind.__name__} needs {page.name}"
    text = page.read_text()
    assert re.match(rf"# {kind.code}: \S", text), "the title is '# CIUIC-xxx: ...'"
    places = [text.find(heading) for heading in HEADINGS]
    assert -1 not in places
    assert places == sorted(places)
    parts = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    assert all(len(part.split()) >= 5 for part in parts), "a heading without text below it"


def test_no_page_is_left_of_a_code_that_is_gone() -> None:
    pages = {page.stem for page in CODES.glob("CIUIC-*.md")}
    assert pages == {kind.code for kind in KINDS} | set(codes())


def test_the_index_lists_each_page_with_its_title() -> None:
    index = (CODES / "index.md").read_text()
    for kind in KINDS:
        title = (CODES / f"{kind.code}.md").read_text().splitlines()[0].removeprefix("# ")
        code, _, words = title.partition(": ")
        assert f"- [{code}]({code}.md): {words}" in index

"""The threat model names a test for each claim: these tests exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "explanation" / "threat-model.md"


def spelled(name: str) -> str:
    """Words only, so that a test's name can be written as a sentence."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def test_every_test_that_is_named_exists() -> None:
    text = re.sub(r"\s+", " ", PAGE.read_text())
    named = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", text)
    defined = {
        spelled(name.removeprefix("test_"))
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = [name for name in named if len(name.split()) > 2]
    assert len(named) >= 15
    assert [name for name in named if spelled(name) not in defined] == []


def test_every_test_file_that_is_named_exists() -> None:
    files = re.findall(r"`((?:unit|processes|cli|docs)/[\w/]+\.py)`", PAGE.read_text())
    assert len(files) > 10
    assert [name for name in files if not (TESTS / name).is_file()] == []

"""The page about failures names a test for each claim: these tests exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "explanation" / "failures.md").read_text()


def spelled(name: str) -> str:
    """Words only, so that a test's name can be written as a sentence."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def test_every_test_that_is_named_exists() -> None:
    named = [name for name in re.findall(r"\*([^*]+)\*", re.sub(r"\s+", " ", PAGE)) if len(name.split()) > 2]
    defined = {
        spelled(name) for path in TESTS.rglob("test_*.py") for name in re.findall(r"def test_(\w+)", path.read_text())
    }
    assert len(named) > 25
    assert [name for name in named if spelled(name) not in defined] == []

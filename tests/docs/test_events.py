"""The page about events names every kind that the hub tells."""

import re
from pathlib import Path

HUB = Path(__file__).parents[2] / "src" / "ciuic" / "hub"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "events.md"
_TOLD = re.compile(r'(?:kind=|kind: str = |tell\(|_emit\()\s*"([a-z]+\.[a-z_]+)"')


def test_the_page_has_every_kind_of_event() -> None:
    told = {kind for path in HUB.rglob("*.py") for kind in _TOLD.findall(path.read_text())}
    assert len(told) > 40
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)`", PAGE.read_text()))
    assert sorted(told - named) == []

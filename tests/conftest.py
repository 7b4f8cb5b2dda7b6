"""What holds for every test: a home of its own, and hypothesis without wall-clock deadlines (two busy cores).

`--hypothesis-profile=soak` looks further; `make soak` does.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

PROFILE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ciuic", PROFILE)
settings.register_profile("soak", PROFILE, max_examples=500)
settings.load_profile("ciuic")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that last for minutes begin first, however the others are shuffled: nobody waits for them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may see or change the state of the person who runs it."""
    monkeypatch.setenv("CIUIC_HOME", str(tmp_path / "ciuic-home"))
    monkeypatch.delenv("CIUIC_TOKEN", raising=False)

"""What holds for every test: a home of its own, and hypothesis without wall-clock deadlines (two busy cores)."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ciuic", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("ciuic")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may see or change the state of the person who runs it."""
    monkeypatch.setenv("CIUIC_HOME", str(tmp_path / "ciuic-home"))
    monkeypatch.delenv("CIUIC_TOKEN", raising=False)

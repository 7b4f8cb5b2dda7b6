"""What the hub says of itself, where it cannot be written."""

import errno
import io
import sys
from collections.abc import Iterator

import pytest
import structlog

from ciuic.hub.port import prepare_log


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_a_log_on_a_full_disk_does_not_stop_whoever_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    prepare_log()
    structlog.get_logger().warning("the state is not stored yet")  # it went through the hub's clock, which then stood
    monkeypatch.setattr(sys, "stderr", room := io.StringIO())
    structlog.get_logger().warning("stored again", run="r-1")
    assert 'event="stored again" run=r-1' in room.getvalue()

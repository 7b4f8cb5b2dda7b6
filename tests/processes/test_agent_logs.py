"""Log lines on their way to the hub: in order, bounded, again after outages, never waiting."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_server import SmallHub

from ciuic.errors import NotFoundError
from ciuic.net.client import HubClient
from ciuic.net.messages import LogLine, LogRequest
from ciuic.node.logs import LogShipper


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    server = SmallHub(tmp_path / "hub").start()
    yield server
    server.stop()


def _shipper(hub: SmallHub, *, limit_bytes: int = 4_000_000) -> LogShipper:
    client = HubClient(hub.url, hub.authority.certificate_pem, *hub.client_files("node", "us-west"), timeout_s=5)
    shipper = LogShipper(client, period_s=0.05, limit_bytes=limit_bytes)
    shipper.start()
    return shipper


def _line(number: int) -> LogLine:
    return LogLine(time=time.time(), rank=0, stream="out", text=f"line {number}")


def _numbers(hub: SmallHub) -> list[int]:
    return [int(line.text.split()[1]) for line in hub.lines if line.text.startswith("line ")]


def test_lines_arrive_in_order(hub: SmallHub) -> None:
    shipper = _shipper(hub)
    for number in range(5000):
        shipper.add("run-1", _line(number))
    shipper.close(deadline_s=20)
    assert _numbers(hub) == list(range(5000))


def test_an_outage_costs_nothing_while_the_buffer_lasts(hub: SmallHub) -> None:
    shipper = _shipper(hub)
    shipper.add("run-1", _line(0))
    hub.wait_for(lambda: len(hub.lines) == 1, "the first line")
    hub.stop()
    for number in range(1, 1000):
        shipper.add("run-1", _line(number))
    time.sleep(0.3)  # let it fail
    hub.start()
    hub.wait_for(lambda: len(hub.lines) >= 1000, "the lines of the outage")
    shipper.close(deadline_s=5)
    came = _numbers(hub)
    assert list(dict.fromkeys(came)) == list(range(1000))
    assert len(came) <= 1001, "the first line comes again when its acknowledgement fell with the hub"


def test_a_full_buffer_drops_the_oldest_and_says_how_many(hub: SmallHub) -> None:
    hub.stop()
    shipper = _shipper(hub, limit_bytes=100_000)
    began = time.monotonic()
    for number in range(20_000):
        shipper.add("run-1", _line(number))
    assert time.monotonic() - began < 5
    hub.start()
    hub.wait_for(lambda: _numbers(hub)[-1:] == [19_999], "the newest line")
    shipper.close(deadline_s=5)
    dropped = sum(int(line.text.split()[0]) for line in hub.lines if "were not sent" in line.text)
    assert dropped > 10_000
    assert len(_numbers(hub)) + dropped == 20_000
    assert _numbers(hub) == sorted(_numbers(hub))


def test_lines_of_a_run_that_is_gone_do_not_hold_up_the_next(hub: SmallHub) -> None:
    def check(request: LogRequest) -> None:
        if request.run_id == "a":
            raise NotFoundError("there is no run a")

    hub.check_logs = check
    shipper = _shipper(hub)
    shipper.add("a", _line(1))
    shipper.add("b", _line(2))
    hub.wait_for(lambda: _numbers(hub) == [2], "the line of the second run")
    shipper.close(deadline_s=5)


def test_closing_does_not_wait_longer_than_it_may(hub: SmallHub) -> None:
    hub.stop()
    shipper = _shipper(hub)
    shipper.add("run-1", _line(0))
    began = time.monotonic()
    shipper.close(deadline_s=0.5)
    assert time.monotonic() - began < 5

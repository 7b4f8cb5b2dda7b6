"""`node check` against a real server, and each step of the way broken once."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_server import SmallHub

from ciuic.node.check import CheckResult, run_checks
from ciuic.node.identity import join, node_folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    server = SmallHub(tmp_path / "hub").start()
    yield server
    server.stop()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def _by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results}


def _join(hub: SmallHub, home: Path) -> None:
    join(node_folder(home, "us-west"), url=hub.url, location="us-west", token=hub.token(), claimed={})


def test_a_machine_that_has_joined_checks_everything_without_an_address(hub: SmallHub, home: Path) -> None:
    _join(hub, home)
    results = _by_name(run_checks(None, home))
    assert list(results)[:6] == ["identity us-west", "dns", "tcp", "tls", "hub", "clock"]
    assert {"disk", "memory", "python", "torch", "device"} <= set(results)
    assert all(results[name].ok for name in ("identity us-west", "dns", "tcp", "tls", "hub", "clock", "python"))
    assert "364 days" in results["identity us-west"].detail
    assert "belongs to this machine's network" in results["tls"].detail


def test_before_joining_the_hub_is_reached_but_not_verified(hub: SmallHub, home: Path) -> None:
    results = _by_name(run_checks(hub.url, home))
    assert results["hub"].ok
    assert "not verified" in results["tls"].detail


def test_without_any_address_it_asks_for_one(home: Path) -> None:
    results = _by_name(run_checks(None, home))
    assert not results["hub"].ok
    assert results["hub"].next == "give the hub's address"


@pytest.mark.parametrize(
    ("url", "name", "words"),
    [
        ("http://hub", "address", "not a hub address"),
        ("https://no-such-host.invalid:8443", "dns", "cannot be resolved"),
    ],
)
def test_a_bad_address_fails_at_its_step(home: Path, url: str, name: str, words: str) -> None:
    results = _by_name(run_checks(url, home))
    assert words in results[name].detail
    assert results[name].next
    assert "hub" not in results


def test_a_port_where_nothing_listens_fails_at_tcp(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    results = _by_name(run_checks(f"https://127.0.0.1:{port}", home))
    assert results["dns"].ok
    assert "refused" in results["tcp"].detail
    assert "tls" not in results


def test_a_hub_of_another_network_fails_at_tls(hub: SmallHub, home: Path, tmp_path: Path) -> None:
    _join(hub, home)
    other = SmallHub(tmp_path / "other").start()
    results = _by_name(run_checks(other.url, home))
    other.stop()
    assert results["tcp"].ok
    assert not results["tls"].ok
    assert "no certificate of this network" in results["tls"].detail


def test_a_damaged_identity_is_reported_and_the_rest_still_checked(hub: SmallHub, home: Path) -> None:
    _join(hub, home)
    (node_folder(home, "us-west") / "identity.json").write_text("{")
    results = _by_name(run_checks(hub.url, home))
    assert not results["identity us-west"].ok
    assert results["hub"].ok

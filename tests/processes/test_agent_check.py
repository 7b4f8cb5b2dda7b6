"""`node check` against a real server, and each step of the way broken once."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_server import SmallHub

from ciuic.net.sockets import CongestionFacts
from ciuic.node import check_more
from ciuic.node.check import run_checks
from ciuic.node.check_more import CheckResult, check_devices
from ciuic.node.identity import held, join, node_folder
from ciuic.node.measurements import Measurements, keep_measurements


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SmallHub]:
    server = SmallHub(tmp_path / "hub").start()
    yield server
    server.stop()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def checked(url: str | None, home: Path) -> list[CheckResult]:
    """Without torch's import, which takes seconds."""
    return run_checks(url, home, check_device=list)


def _by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results}


def _join(hub: SmallHub, home: Path) -> None:
    join(node_folder(home, "us-west"), url=hub.url, location="us-west", token=hub.token(), claimed={})


def test_a_machine_that_has_joined_checks_everything_without_an_address(hub: SmallHub, home: Path) -> None:
    _join(hub, home)
    results = _by_name(checked(None, home))
    assert list(results)[:8] == ["identity us-west", "proxy", "dns", "tcp", "tls", "hub", "clock", "streams"]
    assert {"congestion", "disk", "memory", "python"} <= set(results)
    assert all(results[name].ok for name in ("identity us-west", "dns", "tcp", "tls", "hub", "clock", "python"))
    assert "364 days" in results["identity us-west"].detail
    assert "belongs to this machine's network" in results["tls"].detail


def test_before_joining_the_hub_is_reached_but_not_verified(hub: SmallHub, home: Path) -> None:
    results = _by_name(checked(hub.url, home))
    assert results["hub"].ok
    assert "not verified" in results["tls"].detail


def test_without_any_address_it_asks_for_one(home: Path) -> None:
    results = _by_name(checked(None, home))
    assert not results["hub"].ok
    assert results["hub"].next == "give the hub's address"


def test_what_one_connection_reaches_is_compared_with_several(hub: SmallHub, home: Path) -> None:
    _join(hub, home)
    streams = _by_name(checked(hub.url, home))["streams"]
    assert streams.ok
    assert re.fullmatch(r"up .*bit/s with .*; down .*bit/s with .*", streams.detail)


def test_while_the_agent_runs_its_own_measurements_are_shown(hub: SmallHub, home: Path) -> None:
    _join(hub, home)
    folder = node_folder(home, "us-west")
    values = {"loss_share": 0.01}
    for way in ("up", "down"):
        values |= {f"{way}_1_stream_bits_per_s": 4e6, f"{way}_bits_per_s": 66e6, f"{way}_streams": 8.0}
    keep_measurements(folder, Measurements(at=1.0, values=values))
    with held(folder):
        asked = len(hub.requests)
        detail = _by_name(checked(None, home))["streams"].detail
    side = "4 Mbit/s with 1, 66 Mbit/s with 8"
    assert detail == f"up {side}; down {side}; 1.00% sent again"
    assert not any("probe" in path for _, path in hub.requests[asked:])


def test_without_bbr_the_machine_works_and_the_way_to_it_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_more, "congestion_facts", lambda: CongestionFacts(name="cubic", why_not_bbr="not there"))
    result = _by_name(checked(None, home))["congestion"]
    assert result.ok
    assert "cubic" in result.detail
    assert "sysctl" in result.next


def test_a_proxy_of_the_environment_is_named_without_its_password_and_is_the_first_step(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("HTTPS_PROXY", f"http://alice:secret@127.0.0.1:{port}")
    results = _by_name(checked("https://hub.example:8443", home))
    assert results["proxy"].detail == f"HTTPS_PROXY is set: the way goes through http://127.0.0.1:{port}"
    assert not results["tcp"].ok
    assert "proxy" in results["tcp"].detail
    assert "HTTPS_PROXY" in results["tcp"].next
    assert not any("secret" in result.detail + result.next for result in results.values())


def test_a_torch_that_does_not_answer_in_time_fails_with_a_remedy() -> None:
    (result,) = check_devices(limit_s=0.0)
    assert (result.name, result.ok) == ("torch", False)
    assert "no answer" in result.detail
    assert "install torch" in result.next


def test_torch_is_imported_by_another_process() -> None:
    """That import takes long on a busy machine."""
    results = _by_name(check_devices())
    assert results["torch"].ok, results
    assert results["device"].ok


@pytest.mark.parametrize(
    ("url", "name", "words"),
    [
        ("http://hub", "address", "not a hub address"),
        ("https://no-such-host.invalid:8443", "dns", "cannot be resolved"),
    ],
)
def test_a_bad_address_fails_at_its_step(home: Path, url: str, name: str, words: str) -> None:
    results = _by_name(checked(url, home))
    assert words in results[name].detail
    assert results[name].next
    assert "hub" not in results


def test_a_port_where_nothing_listens_fails_at_tcp(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    results = _by_name(checked(f"https://127.0.0.1:{port}", home))
    assert results["dns"].ok
    assert "refused" in results["tcp"].detail
    assert "tls" not in results


def test_a_hub_of_another_network_fails_at_tls(hub: SmallHub, home: Path, tmp_path: Path) -> None:
    _join(hub, home)
    other = SmallHub(tmp_path / "other").start()
    results = _by_name(checked(other.url, home))
    other.stop()
    assert results["tcp"].ok
    assert not results["tls"].ok
    assert "no certificate of this network" in results["tls"].detail


def test_a_damaged_identity_is_reported_and_the_rest_still_checked(hub: SmallHub, home: Path) -> None:
    _join(hub, home)
    (node_folder(home, "us-west") / "identity.json").write_text("{")
    results = _by_name(checked(hub.url, home))
    assert not results["identity us-west"].ok
    assert results["hub"].ok

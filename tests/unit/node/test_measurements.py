"""What is kept of a node's measurements, and when it is measured again; speeds in child processes."""

import json
import time
from pathlib import Path

import pytest

from ciuic.net.child import ask_child
from ciuic.net.url import HubAddress
from ciuic.node.measurements import STALE_S, Measurements, keep_measurements, load_measurements
from ciuic.node.processor_speed import measure_flops
from ciuic.node.speeds import measure_disk
from ciuic.node.vitals import own_address

NOW = 1_700_000_000.0
KEPT = Measurements(at=NOW, values={"rtt_s": 0.1}, hub_url="https://hub:1", address="10.0.0.1", is_complete=True)


def why(kept: Measurements = KEPT, *, after_s: float = 60.0, url: str = "https://hub:1", ticket: int = 0,
        address: str = "10.0.0.1") -> str:  # fmt: skip
    return kept.why_again(NOW + after_s, hub_url=url, address=address, ticket=ticket)


def test_fresh_values_are_not_measured_again() -> None:
    assert why() == ""
    assert why(after_s=STALE_S - 1) == ""


def test_without_a_network_the_address_does_not_count_as_changed() -> None:
    assert why(address="") == ""


def test_each_reason_to_measure_again_is_told() -> None:
    assert "long ago" in why(after_s=STALE_S + 1)
    assert "long ago" in why(after_s=-60.0), "the clock was set back: the age is not known"
    assert "machine has another address" in why(address="10.0.0.2")
    assert "hub has another address" in why(url="https://hub:2")
    assert "operator" in why(ticket=7)
    assert "nothing" in why(Measurements())
    assert "speeds" in why(Measurements(at=NOW, values={"rtt_s": 0.1}, hub_url="https://hub:1", address="10.0.0.1"))


def test_the_same_wish_is_fulfilled_once_also_after_a_restart(tmp_path: Path) -> None:
    kept = Measurements(
        at=NOW, values=KEPT.values, hub_url=KEPT.hub_url, address=KEPT.address, is_complete=True, ticket=7
    )
    keep_measurements(tmp_path, kept)
    assert load_measurements(tmp_path) == kept
    assert why(load_measurements(tmp_path), ticket=7) == ""


@pytest.mark.parametrize("content", [b"", b"{", b'{"at": "soon"}', b"\xff" * 100, b'{"values": ' + b"[" * 70000])
def test_a_damaged_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "measured.json").write_bytes(content)
    assert load_measurements(tmp_path) == Measurements()


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text(json.dumps({"at": 1.0, "moon": "full"}))
    assert load_measurements(tmp_path).at == 1.0


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_measurements(tmp_path / "file", KEPT)
    assert measure_disk(tmp_path / "file") is None


def test_the_disk_is_measured_and_nothing_stays_behind(tmp_path: Path) -> None:
    rate = measure_disk(tmp_path)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []


def test_matrix_products_are_counted_as_operations() -> None:
    assert measure_flops(size=64, for_s=0.01) > 1e6


def test_the_processors_speed_comes_from_another_process() -> None:
    answer = ask_child("ciuic.node.processor_speed", limit_s=60.0)
    assert isinstance(answer["cpu_flops"], float)
    assert answer["cpu_flops"] > 1e7


def test_a_child_that_does_not_answer_is_ended_and_its_reason_told() -> None:
    assert "no answer" in str(ask_child("http.server", "0", "--bind", "127.0.0.1", limit_s=0.3)["problem"])
    assert "No module named" in str(ask_child("ciuic.no_such_module", limit_s=60.0)["problem"])
    assert ask_child("platform", limit_s=60.0).keys() == {"problem"}


def test_a_child_is_asked_on_its_standard_input() -> None:
    assert ask_child("json.tool", limit_s=60.0, question='{"a": [1, "b"]}') == {"a": [1, "b"]}
    assert "problem" in ask_child("json.tool", limit_s=60.0, question='{"a": "' + 99 * "b" + '"}', answer_limit=50)


def test_a_child_ends_as_soon_as_the_node_has_work() -> None:
    began = time.monotonic()
    ask_child("http.server", "0", "--bind", "127.0.0.1", limit_s=300.0, keep_going=lambda: False)
    assert time.monotonic() - began < 60.0


def test_the_own_address_is_that_of_the_way_to_the_hub() -> None:
    assert own_address(HubAddress(host="127.0.0.1", port=8443)) == "127.0.0.1"
    assert own_address(HubAddress(host="no-such-host.invalid", port=8443)) == ""

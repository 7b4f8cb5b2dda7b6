"""The registry's quantities, the search for the number of streams, what the driver lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import UnreachableError
from ciuic.net.measured import QUANTITIES, claimed_value
from ciuic.net.measured_link import MOST_BYTES, MOST_STREAMS, find_streams
from ciuic.net.probe import parse_gpus


class SharedLink:
    """Each connection reaches at most `one`; all together at most `whole` (bit/s)."""

    def __init__(self, one: float, whole: float, rtt_s: float = 0.15) -> None:
        self.one, self.whole, self.rtt_s = one, whole, rtt_s
        self.asked: list[tuple[int, int]] = []

    def __call__(self, streams: int, count: int) -> float:
        self.asked.append((streams, count))
        return self.rtt_s + 8 * count / min(self.whole, streams * self.one)


@pytest.mark.parametrize(
    ("one", "whole", "streams"), [(100e6, 100e6, 1), (4e6, 100e6, 16), (4e6, 16e6, 4), (30e6, 50e6, 2)]
)
def test_connections_are_added_while_they_pay(one: float, whole: float, streams: int) -> None:
    link = SharedLink(one, whole)
    found = find_streams(link, one, link.rtt_s)
    assert found.streams == streams
    assert found.one_bits_per_s == pytest.approx(one)
    assert found.bits_per_s == pytest.approx(min(whole, streams * one), rel=0.02)


@given(st.floats(1e5, 1e11), st.floats(1, 1000), st.floats(1e-4, 1.0))
def test_the_search_ends_is_bounded_in_bytes_and_never_worse_than_one(one: float, factor: float, rtt_s: float) -> None:
    link = SharedLink(one, one * factor, rtt_s)
    found = find_streams(link, one, rtt_s)
    assert found.bits_per_s >= found.one_bits_per_s
    assert 1 <= found.streams <= MOST_STREAMS
    assert all(count <= MOST_BYTES for _, count in link.asked)
    assert found.bits_per_s <= one * factor * 1.01


def test_a_hub_that_refuses_more_connections_ends_the_search() -> None:
    def refuses(streams: int, count: int) -> float:
        if streams > 2:
            raise UnreachableError("too many connections")
        return 8 * count / (streams * 4e6)

    found = find_streams(refuses, 4e6, 0.0)
    assert (found.streams, found.bits_per_s) == (2, pytest.approx(8e6))


def test_claims_are_compared_in_the_measured_values_unit() -> None:
    claimed = {"gpu": 8.0, "bandwidth_gbit_s": 10.0, "rtt_ms": 90.0, "colour": 1.0}
    assert claimed_value("gpu_count", claimed) == 8.0
    assert claimed_value("up_bits_per_s", claimed) == 10e9
    assert claimed_value("rtt_s", claimed) == pytest.approx(0.09)
    assert claimed_value("disk_free_bytes", claimed) is None


@given(st.floats(0, 1e15))
def test_every_quantity_can_be_shown(value: float) -> None:
    assert all(quantity.show(value) for quantity in QUANTITIES.values())


def test_the_drivers_list_is_read_with_numbers_it_does_not_know() -> None:
    gpus = parse_gpus("NVIDIA H200, 143771, 143002\nNVIDIA GB10, [N/A], [N/A]\n\n")
    assert [gpu.name for gpu in gpus] == ["NVIDIA H200", "NVIDIA GB10"]
    assert gpus[0].memory_bytes == 143771 * 1024**2
    assert (gpus[1].memory_bytes, gpus[1].free_bytes) == (0.0, 0.0)
    assert parse_gpus("") == []


def test_a_network_that_breaks_at_once_is_told() -> None:
    def broken(streams: int, count: int) -> float:
        raise UnreachableError("gone")

    with pytest.raises(UnreachableError):
        find_streams(broken, 1e6, 0.1)

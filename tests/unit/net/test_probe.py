"""The bandwidth probe's arithmetic, on links that are exact."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.net.probe import LARGEST_BYTES, SMALLEST_BYTES, measure_machine, measure_rate


class ExactLink:
    """Bytes take rtt + size / rate; counts what was moved."""

    def __init__(self, bits_per_s: float, rtt_s: float) -> None:
        self.bits_per_s, self.rtt_s, self.sizes = bits_per_s, rtt_s, list[int]()

    def __call__(self, count: int) -> float:
        self.sizes.append(count)
        return self.rtt_s + 8 * count / self.bits_per_s


@given(
    bits_per_s=st.floats(min_value=1e6, max_value=1e11),
    rtt_s=st.floats(min_value=0.0001, max_value=1.0),
)
def test_the_measured_rate_is_never_above_the_true_one_and_exact_where_it_can_be(
    bits_per_s: float, rtt_s: float
) -> None:
    link = ExactLink(bits_per_s, rtt_s)
    measured = measure_rate(link, rtt_s)
    assert measured <= bits_per_s * 1.000001
    if 8 * LARGEST_BYTES / bits_per_s >= rtt_s / 2:
        assert measured == pytest.approx(bits_per_s)


@pytest.mark.parametrize("mbit_per_s", [1, 10, 50, 100, 1000])
def test_a_probe_of_a_slow_link_moves_few_bytes(mbit_per_s: float) -> None:
    link = ExactLink(mbit_per_s * 1e6, 0.15)
    measure_rate(link, 0.15)
    assert sum(link.sizes) <= max(3 * SMALLEST_BYTES, mbit_per_s * 1e6 / 8 * 4)
    assert sum(link.sizes) <= 3 * LARGEST_BYTES


class SlowStart:
    """A window that doubles with every round trip, as a new TCP connection's does, up to the link's rate."""

    def __init__(self, bits_per_s: float, rtt_s: float) -> None:
        self.bits_per_s, self.rtt_s, self.window_bytes = bits_per_s, rtt_s, 14_600.0

    def __call__(self, count: int) -> float:
        took_s, full_bytes = 0.0, self.bits_per_s * self.rtt_s / 8
        while count > 0 and self.window_bytes < full_bytes:
            count -= int(self.window_bytes)
            took_s += self.rtt_s
            self.window_bytes *= 2
        return took_s + self.rtt_s + 8 * max(0, count) / self.bits_per_s


@pytest.mark.parametrize("mbit_per_s", [5, 20, 100])
@pytest.mark.parametrize("rtt_s", [0.01, 0.09, 0.22])
def test_a_connection_that_starts_slowly_is_measured_at_its_full_speed(mbit_per_s: float, rtt_s: float) -> None:
    measured = measure_rate(SlowStart(mbit_per_s * 1e6, rtt_s), rtt_s)
    assert 0.8 * mbit_per_s * 1e6 <= measured <= 1.001 * mbit_per_s * 1e6


def test_the_machine_is_measured_even_where_the_folder_does_not_exist_yet(tmp_path: Path) -> None:
    measured = measure_machine(tmp_path / "not" / "yet")
    assert measured["cpu_count"] >= 1
    assert measured["memory_free_bytes"] > 0
    assert measured["disk_free_bytes"] > 0
    assert measured["gpu_count"] >= 0

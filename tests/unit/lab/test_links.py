"""Links, their clock and their lanes, on a fake loop that only knows the time."""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import UsageError
from ciuic.lab.links import QUEUE_BYTES, Lane, Link, LinkClock
from ciuic.lab.profiles import continents


class FakeTimer:
    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """Time passes only in `run_until`."""

    def __init__(self) -> None:
        self._time = 100.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, FakeTimer]] = []

    def time(self) -> float:
        return self._time

    def call_at(self, when: float, callback: Callable[[], object], /) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._due, (when, next(self._order), timer))
        return timer

    def run_until(self, time: float) -> None:
        while self._due and self._due[0][0] <= time:
            when, _, timer = heapq.heappop(self._due)
            self._time = max(self._time, when)
            if not timer.cancelled:
                timer.call()
        self._time = time


class Bulk:
    """Has `size` bytes to send from the beginning."""

    def __init__(self, size: int, ready_at: float) -> None:
        self.left = size
        self.ready_at = ready_at
        self.taken = 0
        self.arrivals: list[tuple[float, int]] = []

    def take(self, limit_bytes: int) -> tuple[int, float]:
        self.taken = min(limit_bytes, self.left)
        self.left -= self.taken
        return self.taken, self.ready_at

    def launch(self, arrive_at: float) -> None:
        self.arrivals.append((arrive_at, self.taken))

    @property
    def waiting(self) -> bool:
        return self.left > 0

    def arrived(self, until: float) -> int:
        return sum(size for at, size in self.arrivals if at <= until)


def clock_of(loop: FakeLoop) -> LinkClock:
    return LinkClock(cast("asyncio.AbstractEventLoop", loop))


def lane_of(link: Link, loop: FakeLoop) -> tuple[Lane, LinkClock]:
    clock = clock_of(loop)
    return Lane(clock, link, link.up_bits_per_s, random.Random(0)), clock


def make_link(mbit_s: float = 8, delay_s: float = 0.1) -> Link:
    return Link(name="x", up_bits_per_s=mbit_s * 1e6, down_bits_per_s=mbit_s * 1e6, one_way_delay_s=delay_s)


def test_a_lane_takes_size_over_rate_plus_the_delay() -> None:
    loop = FakeLoop()
    lane, _ = lane_of(make_link(), loop)
    bulk = Bulk(1_000_000, loop.time())
    lane.offer(bulk)
    loop.run_until(200)
    assert bulk.arrivals[0][0] > 100.1
    assert bulk.arrivals[-1][0] == pytest.approx(101.1)


@given(sizes=st.lists(st.integers(100_000, 1_000_000), min_size=2, max_size=5))
def test_connections_share_a_lane_equally_and_use_it_fully(sizes: list[int]) -> None:
    loop = FakeLoop()
    lane, _ = lane_of(make_link(delay_s=0), loop)
    bulks = [Bulk(size, loop.time()) for size in sizes]
    for bulk in bulks:
        lane.offer(bulk)
    loop.run_until(1000)
    first_done = min(bulk.arrivals[-1][0] for bulk in bulks)
    shares = [bulk.arrived(first_done) for bulk in bulks]
    assert max(shares) - min(shares) <= 2 * 2000
    assert max(bulk.arrivals[-1][0] for bulk in bulks) == pytest.approx(100 + sum(sizes) * 8 / 8e6)


def test_an_idle_lane_saves_nothing_up() -> None:
    loop = FakeLoop()
    lane, _ = lane_of(make_link(delay_s=0), loop)
    loop.run_until(150)
    late = Bulk(1_000_000, loop.time())
    lane.offer(late)
    loop.run_until(200)
    assert late.arrivals[-1][0] == pytest.approx(151)


def test_time_stands_still_while_the_link_is_down() -> None:
    loop = FakeLoop()
    lane, clock = lane_of(make_link(delay_s=0), loop)
    bulk = Bulk(1_000_000, clock.now())
    lane.offer(bulk)
    loop.run_until(100.5)
    before = bulk.left
    clock.stop()
    loop.run_until(130.5)
    assert bulk.left == before
    assert clock.now() == 100.5
    clock.resume()
    loop.run_until(131.1)
    assert bulk.left == 0
    assert bulk.arrivals[-1][0] == pytest.approx(101)  # link time: the 30 s do not count


def test_a_timer_of_a_stopped_clock_waits_and_a_cancelled_one_never_comes() -> None:
    loop = FakeLoop()
    clock = clock_of(loop)
    called: list[str] = []
    clock.stop()
    clock.call_at(101, lambda: called.append("kept"))
    clock.call_at(101, lambda: called.append("cancelled")).cancel()
    loop.run_until(110)
    assert called == []
    clock.resume()
    loop.run_until(111)
    assert called == ["kept"]


def test_a_window_is_what_is_in_flight_and_a_queue() -> None:
    lane, _ = lane_of(make_link(mbit_s=80, delay_s=0.08), FakeLoop())
    assert lane.window_bytes == 800_000 + QUEUE_BYTES


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_link_without_a_usable_rate_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="eu-central cannot have a rate"):
        Link(name="eu-central", up_bits_per_s=1e6, down_bits_per_s=rate, one_way_delay_s=0.1)


@pytest.mark.parametrize("delay_s", [-0.1, 60, float("nan")])
def test_a_link_with_an_impossible_delay_is_refused(delay_s: float) -> None:
    with pytest.raises(UsageError, match="impossible delay"):
        Link(name="x", up_bits_per_s=1e6, down_bits_per_s=1e6, one_way_delay_s=delay_s)


def test_the_continents_are_as_documented() -> None:
    profile = continents()
    links = {site.location: site.link for site in profile.sites}
    assert profile.locations == ("us-west", "eu-central", "ap-southeast")
    assert profile.hub_location == "us-west"
    assert {name: link.up_bits_per_s for name, link in links.items()} == {
        "us-west": 100e6,
        "eu-central": 50e6,
        "ap-southeast": 80e6,
    }
    assert {name: round(link.round_trip_s, 6) for name, link in links.items()} == {
        "us-west": 0.002,
        "eu-central": 0.14,
        "ap-southeast": 0.16,
    }
    assert profile.round_trips_s[frozenset({"eu-central", "ap-southeast"})] == 0.22
    assert [site.claimed for site in profile.sites] == [
        {"gpu": 8, "bandwidth_gbit_s": 10},
        {"gpu": 4, "bandwidth_gbit_s": 5},
        {"gpu": 8, "bandwidth_gbit_s": 8},
    ]
    with pytest.raises(UsageError, match="no site 'mars'"):
        profile.site("mars")

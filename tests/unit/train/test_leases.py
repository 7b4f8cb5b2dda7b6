"""The samples a worker has ready: in order, what was lost first, and asked for before they run out."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import UnreachableError
from ciuic.ledger.intervals import Range
from ciuic.net import messages as m
from ciuic.train.leases import Leases


class Hub:
    """Stands where the HubClient stands: answers lease requests from what the test gives it."""

    def __init__(self, total: int, *, fail_every: int = 0) -> None:
        self.next, self.total, self.fail_every = 0, total, fail_every
        self.requests: list[m.LeaseRequest] = []
        self.held: threading.Event | None = None
        self.wait_first = 0

    def call(self, method: str, path: str, message: m.LeaseRequest, reply_type: type) -> m.LeaseReply:
        assert (method, path) == ("POST", "/v1/runs/r1/lease")
        if self.held is not None:
            self.held.wait(10)
        self.requests.append(message)
        if self.fail_every and len(self.requests) % self.fail_every == 0:
            raise UnreachableError("the line is cut")
        if self.wait_first > 0:
            self.wait_first -= 1
            return m.LeaseReply(status="wait")
        if self.next >= self.total:
            return m.LeaseReply(status="finished", final_versions=[7])
        stop = min(self.total, self.next + message.count)
        ranges, self.next = [(self.next, stop)], stop
        return m.LeaseReply(status="granted", ranges=ranges)


@contextmanager
def running(leases: Leases, hub: Hub) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=leases.loop, args=(hub, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        if hub.held is not None:
            hub.held.set()
        thread.join(10)
        assert not thread.is_alive()


def leases_of(*ranges: Range) -> Leases:
    """Leases that hold these, as if the hub had granted them."""
    leases = Leases("r1", 1, chunk=4, ahead=0)
    leases.put_back(ranges)
    return leases


def numbers(ranges: list[Range]) -> list[int]:
    return [n for start, stop in ranges for n in range(start, stop)]


RANGES = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9)).map(lambda r: (r[0], r[0] + r[1])), max_size=6)


@given(ranges=RANGES, counts=st.lists(st.integers(0, 12), max_size=30))
def test_samples_come_in_the_order_in_which_they_were_leased(ranges: list[Range], counts: list[int]) -> None:
    leases, wanted = leases_of(*ranges), numbers(ranges)
    for count in counts:
        taken = numbers(leases.take(count))
        assert taken == wanted[:count]
        wanted = wanted[count:]
        assert leases.has_samples == bool(wanted)
    assert numbers(leases.take(10**6)) == wanted


@given(ranges=RANGES, first=st.integers(0, 30), again=st.integers(0, 30))
def test_lost_work_is_done_again_before_anything_else(ranges: list[Range], first: int, again: int) -> None:
    leases = leases_of(*ranges)
    lost = leases.take(first)
    leases.put_back(lost)
    assert numbers(leases.take(again)) == numbers(ranges)[:again]


def test_a_batch_may_span_two_leases() -> None:
    leases = leases_of((0, 3), (10, 12))
    assert leases.take(4) == [(0, 3), (10, 11)]
    assert leases.take(4) == [(11, 12)]
    assert leases.take(4) == []


def take_all(leases: Leases, batch: int = 3) -> list[int]:
    """What a training loop would train until the run is complete."""
    found: list[int] = []
    while leases.wait(10):
        taken = numbers(leases.take(batch))
        if not taken and leases.is_complete:
            return found
        found += taken
    raise AssertionError("no samples and no end for 10 s")


@pytest.mark.parametrize("fail_every", [0, 2, 3])
def test_every_sample_is_taken_once_until_the_run_is_complete_also_over_a_bad_line(fail_every: int) -> None:
    hub, leases = Hub(50, fail_every=fail_every), Leases("r1", 3, chunk=8, ahead=10)
    with running(leases, hub):
        assert take_all(leases) == list(range(50))
    assert leases.final_versions == [7]
    assert {r.incarnation for r in hub.requests} == {3}
    assert min(r.count for r in hub.requests) >= 8


def test_a_request_keeps_its_number_until_it_was_answered_with_samples() -> None:
    hub, leases = Hub(12, fail_every=2), Leases("r1", 1, chunk=4, ahead=4)
    hub.wait_first = 1
    with running(leases, hub):
        take_all(leases)
    ids = [r.request_id for r in hub.requests]
    assert ids[0] == ids[1] == 1, "wait, then the line was cut: the same request again"
    assert ids == sorted(ids)
    assert set(ids) == set(range(1, max(ids) + 1))
    assert max(ids) == 4, "three granted, and the last one that heard of the end"


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Poll with a deadline."""
    step = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        step.wait(0.005)
    raise AssertionError("not in time")


def test_samples_are_leased_ahead_and_not_more_than_that() -> None:
    hub, leases = Hub(1000), Leases("r1", 1, chunk=10, ahead=25)
    with running(leases, hub):
        until(lambda: not leases.may_come)
        assert hub.next == 25
        assert leases.take(5) == [(0, 5)]
        until(lambda: hub.next == 35)
        until(lambda: not leases.may_come)
        assert leases.take(10) == [(5, 15)]
        until(lambda: hub.next == 45)
        until(lambda: not leases.may_come)
        assert hub.next == 45


def test_an_answer_that_is_on_its_way_is_known() -> None:
    hub, leases = Hub(10), Leases("r1", 1, chunk=10, ahead=1)
    hub.held = threading.Event()
    assert leases.may_come
    with running(leases, hub):
        assert leases.may_come
        assert not leases.wait(0.01)
        hub.held.set()
        assert leases.wait(10)
        assert leases.has_samples


def test_while_the_hub_has_nothing_free_no_answer_is_expected() -> None:
    hub, leases = Hub(10), Leases("r1", 1, chunk=10, ahead=1)
    hub.wait_first = 1
    with running(leases, hub):
        until(lambda: len(hub.requests) >= 1 and not leases.may_come)
        assert not leases.has_samples or leases.take(1)
        assert leases.wait(10)

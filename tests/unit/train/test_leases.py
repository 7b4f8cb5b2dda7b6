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


@pytest.fixture(autouse=True)
def _tell_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has enough samples looks up soon, so that a test need not wait for it."""
    monkeypatch.setattr("ciuic.train.leases.TELL_S", 0.1)


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
        if self.wait_first > 0 or not message.count:
            self.wait_first = max(0, self.wait_first - 1)
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


# ---- what is in hand


def held(leases: Leases) -> list[int]:
    return numbers(leases.request(0).holds)


def test_what_is_in_hand_is_told_until_the_hub_has_it() -> None:
    leases = leases_of((0, 10))
    request = leases.request(0)
    assert (request.ready, request.holds, request.returned) == (10, [(0, 10)], [])
    leases.take(4)
    request = leases.request(0)
    assert (request.ready, request.holds) == (6, [(0, 10)])
    leases.accepted([(0, 3)])
    assert held(leases) == [*range(3, 10)]
    leases.put_back([(3, 4)])
    request = leases.request(0)
    assert (request.ready, request.holds) == (7, [(3, 10)])


def test_the_last_samples_are_given_back_when_the_hub_asks_and_told_until_it_has_heard() -> None:
    leases = leases_of((0, 5), (20, 26))
    leases.take(2)
    leases.take_reply(m.LeaseReply(status="wait", give_back=8))
    assert leases.ready == [(2, 3)]
    first = leases.request(0)
    assert sorted(numbers(first.returned)) == [3, 4, *range(20, 26)]
    assert leases.request(5).returned == first.returned, "the answer was lost: the same again"
    assert set(numbers(first.returned)).isdisjoint(numbers(first.holds))
    leases.take_reply(m.LeaseReply(status="wait"))
    assert leases.request(0).returned == []


def test_what_is_started_is_not_given_back() -> None:
    leases = leases_of((0, 6))
    leases.take(4)
    leases.take_reply(m.LeaseReply(status="wait", give_back=100))
    assert numbers(leases.request(0).returned) == [4, 5]
    assert not leases.has_samples


@given(ranges=RANGES, void=RANGES)
def test_what_others_have_taken_is_not_started(ranges: list[Range], void: list[Range]) -> None:
    leases, taken = leases_of(*ranges), set(numbers(void))
    leases.take_reply(m.LeaseReply(status="wait", void=void))
    assert numbers(leases.ready) == [n for n in numbers(ranges) if n not in taken]


def test_samples_that_come_with_the_answer_are_not_dropped_with_the_old_ones() -> None:
    leases = leases_of((0, 4))
    leases.take_reply(m.LeaseReply(status="granted", ranges=[(2, 6)], void=[(2, 4)]))
    assert numbers(leases.ready) == [0, 1, 2, 3, 4, 5]


def test_a_worker_that_leaves_gives_back_what_it_has_not_started_and_asks_for_nothing_more() -> None:
    hub, leases = Hub(1000), Leases("r1", 1, chunk=10, ahead=25)
    with running(leases, hub):
        until(lambda: not leases.may_come)
        assert leases.take(5) == [(0, 5)]
        leases.drain()
        until(lambda: any(r.returned for r in hub.requests))
    given = next(r for r in hub.requests if r.returned)
    assert numbers(given.returned)[0] == 5
    assert (given.ready, given.count) == (0, 0)
    assert given.holds == [(0, 5)], "what it has trained it will push"
    assert not leases.has_samples


def test_who_has_samples_for_long_asks_seldom() -> None:
    hub, leases = Hub(10), Leases("r1", 1, chunk=10, ahead=10_000)
    leases.step_s = 1.0
    hub.wait_first = 1000
    leases.put_back([(0, 400)])
    with running(leases, hub):
        until(lambda: bool(hub.requests))
        threading.Event().wait(1.0)
        assert len(hub.requests) == 1, "it has enough for minutes"
        assert leases.take(400)
        until(lambda: len(hub.requests) > 4)


class Closing(Hub):
    """A hub on a connection that is closed after the one request."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_the_first_request_goes_ahead_of_the_loop_and_is_repeated_there_when_it_fails() -> None:
    ahead = Closing(100)
    leases = Leases("r1", 1, chunk=8, ahead=8)
    leases.ask_ahead(ahead)  # type: ignore[arg-type]  # ty: ignore[invalid-argument-type]
    leases.asked_ahead()
    assert leases.ready == [(0, 8)]
    assert ahead.is_closed
    assert [request.request_id for request in ahead.requests] == [1]

    failing = Closing(100, fail_every=1)
    leases = Leases("r1", 1, chunk=8, ahead=8)
    leases.ask_ahead(failing)  # type: ignore[arg-type]  # ty: ignore[invalid-argument-type]
    leases.asked_ahead()
    assert leases.ready == []
    assert leases.request(8).request_id == 1, "the hub may have granted it: the same again"

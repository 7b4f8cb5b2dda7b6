"""How much one caller may ask, with a clock that is moved by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import UsageError
from ciuic.hub.access.limits import FORGET_EVERY, Bucket, Buckets, Limits, LimitSettings


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = Bucket(2.0, 5.0, now_s=0.0)
    assert [bucket.take(0.0) for _ in range(6)] == [True] * 5 + [False]
    assert bucket.wait_s(0.0) == pytest.approx(0.5)
    assert bucket.take(0.5)
    assert not bucket.take(0.9)


@given(st.lists(st.floats(0, 10), max_size=60))
def test_no_schedule_of_requests_gets_more_than_burst_and_rate(pauses: list[float]) -> None:
    bucket, now_s, taken = Bucket(3.0, 7.0, now_s=0.0), 0.0, 0
    for pause_s in pauses:
        now_s += pause_s
        taken += bucket.take(now_s)
        assert taken <= 7.0 + 3.0 * now_s + 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(1.0, 1.0, now_s=100.0)
    assert bucket.take(100.0)
    assert not bucket.take(0.0)


def test_a_million_addresses_are_not_remembered() -> None:
    buckets = Buckets(10.0, 10.0)
    for number in range(20_000):
        buckets.take(f"10.0.{number}", float(number))
    assert len(buckets) <= 2 * FORGET_EVERY


def test_names_behind_one_address_do_not_hinder_each_other() -> None:
    limits = Limits(LimitSettings(requests_per_s=1, requests_burst=3, stranger_requests_burst=2))
    assert [limits.ask("nat", "node/a", 0.0) for _ in range(4)][:3] == [0.0, 0.0, 0.0]
    assert limits.ask("nat", "node/a", 0.0) > 0
    assert limits.ask("nat", "node/b", 0.0) == 0.0
    assert [limits.ask("nat", "", 0.0) > 0 for _ in range(3)] == [False, False, True]
    assert limits.ask("nat", "node/b", 0.0) == 0.0
    assert limits.ask("elsewhere", "", 0.0) == 0.0


def test_connections_are_given_back_when_they_end() -> None:
    limits = Limits(LimitSettings(connections=2, stranger_connections=1))
    for _ in range(50):
        assert limits.arrive("x", 0.0) == ""
        assert limits.settle("x", "node/a", 0.0) == ""
        limits.leave("x", "node/a")
    assert limits.total == 0
    for expected in ("", "", "open"):
        limits.arrive("x", 0.0)
        assert limits.settle("x", "node/a", 0.0) == expected
    limits.arrive("x", 0.0)
    assert limits.settle("x", "", 0.0) == ""
    limits.arrive("x", 0.0)
    assert limits.settle("x", "", 0.0) == "open"
    assert limits.total == 3


def test_unfinished_handshakes_are_counted_by_address() -> None:
    limits = Limits(LimitSettings(pending_handshakes=3))
    assert [limits.arrive("x", 0.0) for _ in range(4)] == ["", "", "", "pending"]
    assert limits.arrive("y", 0.0) == ""
    limits.give_up("x", 0.0)
    assert limits.arrive("x", 0.0) == ""


def test_failed_handshakes_use_up_what_strangers_of_an_address_have() -> None:
    limits = Limits(LimitSettings(stranger_handshakes_per_s=1, stranger_handshakes_burst=5))
    for _ in range(5):
        assert limits.arrive("x", 0.0) == ""
        limits.give_up("x", 0.0)
    assert limits.arrive("x", 0.0) == "rate"
    assert limits.arrive("y", 0.0) == ""
    assert limits.arrive("x", 1.1) == ""
    assert limits.refused["rate"] == 1


def test_nodes_that_handshake_well_use_nothing_up() -> None:
    limits = Limits(LimitSettings(stranger_handshakes_per_s=1, stranger_handshakes_burst=1))
    for number in range(100):
        assert limits.arrive("nat", 0.0) == ""
        assert limits.settle("nat", f"node/{number}", 0.0) == ""


def test_strangers_leave_room_for_those_who_have_a_certificate() -> None:
    limits = Limits(LimitSettings(total_strangers=10, stranger_connections=10))
    for number in range(10):
        assert limits.arrive(f"s{number}", 0.0) == ""
        assert limits.settle(f"s{number}", "", 0.0) == ""
    assert limits.arrive("s11", 0.0) == "full"
    limits.leave("s3", "")
    assert limits.arrive("node", 0.0) == ""
    assert limits.settle("node", "node/a", 0.0) == ""


def test_settings_are_read_from_the_command_line() -> None:
    changed = LimitSettings().changed(["connections=2000", "requests-per-s=50.5"])
    assert (changed.connections, changed.requests_per_s) == (2000, 50.5)
    assert changed.total_connections == LimitSettings().total_connections
    for wrong in ("connections", "connections=0", "connections=x", "conections=5", "connections=inf"):
        with pytest.raises(UsageError, match="is not a limit"):
            LimitSettings().changed([wrong])

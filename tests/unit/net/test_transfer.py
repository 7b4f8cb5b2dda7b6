"""How many connections a transfer uses, and what becomes of errors of their threads."""

import pytest

from ciuic.net.exchange import Exchange
from ciuic.net.transfer import LEAST_STREAMS, MOST_STREAMS, Fan, Moved, StreamCount, wanted_streams


@pytest.mark.parametrize(
    ("bits_per_s", "round_trip_s", "lossy", "bbr", "expected"),
    [
        (100e6, 0.15, False, True, LEAST_STREAMS),
        (1e9, 0.15, False, True, 9),
        (10e9, 0.15, False, True, MOST_STREAMS),
        (100e6, 0.15, True, True, LEAST_STREAMS),
        (100e6, 0.15, True, False, MOST_STREAMS),
        (1e6, 0.0, False, False, LEAST_STREAMS),
    ],
)
def test_connections_follow_rate_times_round_trip_and_loss_without_bbr(
    bits_per_s: float, round_trip_s: float, lossy: bool, bbr: bool, expected: int
) -> None:
    assert wanted_streams(bits_per_s, round_trip_s, lossy=lossy, bbr=bbr) == expected


def moved(bits_per_s: float) -> Moved:
    return Moved(moved_bytes=int(bits_per_s), seconds=8.15, round_trip_s=0.15)


def test_the_number_grows_at_once_and_shrinks_only_for_much_less() -> None:
    count = StreamCount()
    count.learn(moved(1e9), bbr=True)
    assert count.count == 9
    count.learn(moved(0.8e9), bbr=True)
    assert count.count == 9
    for _ in range(20):
        count.learn(moved(50e6), bbr=True)
    assert count.count == LEAST_STREAMS


def test_a_crash_in_one_of_the_threads_is_raised_when_all_have_ended() -> None:
    def crash() -> None:
        raise ZeroDivisionError

    def never() -> Exchange:
        raise AssertionError

    done: list[int] = []
    with pytest.raises(ZeroDivisionError):
        Fan(make=never).run([lambda: done.append(1), crash, lambda: done.append(2)])
    assert sorted(done) == [1, 2]

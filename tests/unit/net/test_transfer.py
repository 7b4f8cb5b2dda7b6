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


def uses(share: float, *, unpaced: float, loses: float = 0.0, transfers: int = 40) -> list[float]:
    """How much of a path at 100 Mbit/s transfers of 32 MB use when they bring `share` of what they may send."""
    count, path, found = StreamCount(), 100e6, []
    for _ in range(transfers):
        pace = count.pace_bits_per_s(32_000_000)
        overflows = not pace or pace > 1.08 * path
        rate = path * unpaced if not pace else share * min(path, pace)
        repeated = loses + (0.05 if overflows else 0.0)
        seconds = 8 * 32_000_000 / rate + 0.15
        count.learn(
            Moved(moved_bytes=32_000_000, seconds=seconds, round_trip_s=0.15, repeated_share=repeated), bbr=True
        )
        found.append(rate / path)
    return found


@pytest.mark.parametrize("share", [0.85, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("unpaced", [0.5, 0.65, 0.9])
def test_the_pace_finds_the_rate_of_a_path_whose_queue_overflows(share: float, unpaced: float) -> None:
    found = uses(share, unpaced=unpaced)
    assert found[4] >= 0.97 * share
    assert min(found[10:]) >= 0.85 * share
    assert sum(found[10:]) / 30 >= 0.93 * share


@pytest.mark.parametrize("share", [0.7, 0.8, 0.95])
def test_a_path_that_loses_packets_by_itself_is_not_paced_to_a_standstill(share: float) -> None:
    assert min(uses(share, unpaced=0.8, loses=0.02, transfers=200)[5:]) >= 0.75 * share


def test_short_transfers_are_not_paced_and_one_that_loses_nothing_never_is() -> None:
    count = StreamCount()
    for _ in range(5):
        count.learn(moved(100e6), bbr=True)
    assert count.pace_bits_per_s(1 << 30) == 0.0
    count.learn(Moved(moved_bytes=32_000_000, seconds=4.0, round_trip_s=0.15, repeated_share=0.2), bbr=True)
    assert count.pace_bits_per_s(1 << 30) > 0.0
    assert count.pace_bits_per_s(1 << 20) == 0.0


def test_a_crash_in_one_of_the_threads_is_raised_when_all_have_ended() -> None:
    def crash() -> None:
        raise ZeroDivisionError

    def never() -> Exchange:
        raise AssertionError

    done: list[int] = []
    with pytest.raises(ZeroDivisionError):
        Fan(make=never).run([lambda: done.append(1), crash, lambda: done.append(2)])
    assert sorted(done) == [1, 2]

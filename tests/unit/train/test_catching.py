"""A joiner on a fast link gets near, one on a slow link is told so after a few fetches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import CannotCatchUpError
from ciuic.train.catching import ATTEMPTS, EXPIRED_LIMIT, STALE_LIMIT, CatchUp, Fetch, Lateness, check_expired

NEAR = 4


def join(*, growth: float, link: float, entry_bytes: int, behind: int, clocks_s: float, limit: int = 400) -> str:
    """How joining ends: `growth` and `link` in bytes per second, the ledger is `behind` entries ahead at the start."""
    catching, now_s, written, have = CatchUp(near=NEAR), 0.0, float(behind), 0
    for _ in range(limit):
        count = int(written) - have
        if count <= 0:
            return "caught up"
        seconds = count * entry_bytes / link
        have += count
        now_s += seconds
        written += growth * seconds / entry_bytes
        made_s = (have - behind) * entry_bytes / growth  # when the newest fetched entry was written
        fetch = Fetch(entries=count, size_bytes=count * entry_bytes, seconds=seconds, age_s=now_s - made_s + clocks_s)
        try:
            if catching.fetched(fetch):
                return "near"
        except CannotCatchUpError as error:
            return "set aside" if "its link brings" in error.cause else error.cause
    return "still at it"


@given(speed=st.floats(1.3, 50), behind=st.integers(1, 5000), clocks_s=st.floats(-1e4, 1e4))
def test_a_link_that_is_faster_than_the_ledger_grows_ends_near_it(speed: float, behind: int, clocks_s: float) -> None:
    assert join(growth=1e5, link=speed * 1e5, entry_bytes=1000, behind=behind, clocks_s=clocks_s) in (
        "caught up",
        "near",
    )


@given(speed=st.floats(0.05, 0.9), behind=st.integers(50, 5000), clocks_s=st.floats(-1e4, 1e4))
def test_a_link_that_is_slower_is_set_aside_after_a_few_fetches(speed: float, behind: int, clocks_s: float) -> None:
    how = join(growth=1e4, link=speed * 1e4, entry_bytes=1000, behind=behind, clocks_s=clocks_s, limit=ATTEMPTS + 2)
    assert how == "set aside"


def test_one_entry_more_at_each_fetch_is_near_enough() -> None:
    catching = CatchUp(near=NEAR)
    answers = [catching.fetched(Fetch(entries=1, size_bytes=10, seconds=1.0, age_s=1.0)) for _ in range(ATTEMPTS + 1)]
    assert answers == [False] * ATTEMPTS + [True]


def test_snapshots_that_expire_again_and_again_are_a_reason() -> None:
    for times in range(EXPIRED_LIMIT):
        check_expired(times)
    with pytest.raises(CannotCatchUpError, match="cannot catch up"):
        check_expired(EXPIRED_LIMIT)


def test_pushes_that_are_always_too_late_are_a_reason_and_one_in_time_wipes_the_slate() -> None:
    lateness = Lateness()
    for version in range(STALE_LIMIT - 1):
        lateness.stale(version)
    lateness.arrived()
    for version in range(STALE_LIMIT - 1):
        lateness.stale(100 + version)
    with pytest.raises(CannotCatchUpError, match="cannot catch up"):
        lateness.stale(1000)


def test_a_ledger_that_stands_still_does_not_run_away() -> None:
    lateness = Lateness()
    for _ in range(10 * STALE_LIMIT):
        lateness.stale(7)

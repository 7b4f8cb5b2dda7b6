import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import UsageError
from ciuic.units import format_bytes, format_count, format_duration, format_rate, parse_duration_s, parse_rate


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        (90, 90),
        (1.5, 1.5),
        ("90 s", 90),
        ("90s", 90),
        ("1.5 s", 1.5),
        (".5 s", 0.5),
        ("250 ms", 0.25),
        ("10 sec", 10),
        ("10 secs", 10),
        ("10 min", 600),
        ("2 mins", 120),
        ("3 m", 180),
        ("2 h", 7200),
        ("7 d", 604_800),
        ("1 day", 86_400),
        ("2 days", 172_800),
        ("2 hours", 7200),
        ("1 minute", 60),
        ("30 seconds", 30),
        ("  2 H ", 7200),
        ("0", 0),
    ],
)
def test_durations_as_people_write_them(text: str | float, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", " ", "s", "10 parsecs", "ten s", "10 s 5", "1,5 s", "-5 s", "10 minutess", "5 ss", "inf", "nan", "1e3 s"],
)
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration") as caught:
        parse_duration_s(text)
    assert "10 min" in caught.value.next


@given(text=st.text(max_size=20))
def test_any_text_is_a_duration_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_duration_s(text) >= 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1536, "1.5 kB"), (2_500_000, "2.5 MB"), (8e9, "8.0 GB"),
     (3e12, "3.0 TB"), (5e15, "5000.0 TB"), (-1536, "-1.5 kB"), (999.6, "1.0 kB"), (999_960, "1.0 MB")],
)  # fmt: skip
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1234, "1.2k"), (1_234_567, "1.2M"), (6.7e11, "670.0G"), (2e12, "2.0T"), (999_960, "1.0M"),
     (-1234, "-1.2k")],
)  # fmt: skip
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.25, "250 ms"), (1, "1.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (75, "1 min 15 s"),
     (3599.4, "59 min 59 s"), (3600, "1 h 0 min"), (7260, "2 h 1 min"), (90_000, "25 h 0 min"),
     (59.97, "1 min 0 s"), (0.9996, "1.0 s")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0 bit/s"), (950, "950 bit/s"), (50e6, "50 Mbit/s"), (1.25e9, "1.25 Gbit/s"), (4e12, "4 Tbit/s"),
     (999_600, "1 Mbit/s")],
)  # fmt: skip
def test_rates(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@given(value=st.integers(0, 10**14))
def test_a_number_never_has_four_digits_where_a_larger_unit_has_one(value: int) -> None:
    for form in (format_bytes, format_count, format_rate):
        text = form(value)
        number = float(text.split(" ")[0].rstrip("kMGT"))
        assert number < 1000 or "T" in text
        assert "e" not in text


@pytest.mark.parametrize(
    ("text", "rate"), [("20Mbit/s", 20e6), ("1.5 Gbit/s", 1.5e9), ("80M", 80e6), ("64kbit/s", 64e3)]
)
def test_rates_are_read(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "fast", "0", "-1M", "5MB/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a rate"):
        parse_rate(text)

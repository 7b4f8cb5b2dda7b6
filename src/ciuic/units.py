"""Numbers with units, for people: parsing what they type and printing what we measured."""

import re

from ciuic.errors import UsageError

_DURATION_S = {"ms": 0.001, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "day": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def parse_duration_s(text: str | float) -> float:
    """Seconds from `90`, `"90 s"`, `"10 min"`, `"2 h"` or `"7 d"`.

    Raises UsageError for anything else.
    """
    if isinstance(text, int | float):
        return float(text)
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if unit not in _DURATION_S and unit.endswith("s"):
        unit = unit[:-1]  # "days", "mins"
    if match is None or (unit and unit not in _DURATION_S):
        raise UsageError(f"{text!r} is not a duration", next="write for example 30 s, 10 min, 2 h or 7 d")
    return float(match.group(1)) * _DURATION_S.get(unit, 1.0)


def format_bytes(count: float) -> str:
    """`1536` as `1.5 kB` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def format_count(count: float) -> str:
    """`1234567` as `1.2M`."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 1000 or unit == "T":
            return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """`0.25` as `250 ms`, `75` as `1 min 15 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def format_rate(bits_per_s: float) -> str:
    """`50e6` as `50 Mbit/s`."""
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if bits_per_s < 1000 or unit == "Gbit/s":
            return f"{bits_per_s:.3g} {unit}"
        bits_per_s /= 1000
    raise AssertionError("unreachable")

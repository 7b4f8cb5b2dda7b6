"""Numbers with units, for people: parsing what they type and printing what we measured."""

import re

from ciuic.errors import UsageError

_DURATION_S = {
    "ms": 0.001,
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")
_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kMGT]?)(?:bit/s)?\s*")
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_duration_s(text: str | float) -> float:
    """Seconds from `90`, `"90 s"`, `"10 min"`, `"2 h"` or `"7 d"`.

    Raises UsageError for anything else.
    """
    if isinstance(text, int | float):
        return float(text)
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or (unit and unit not in _DURATION_S):
        raise UsageError(f"{text!r} is not a duration", next="write for example 30 s, 10 min, 2 h or 7 d")
    return float(match.group(1)) * _DURATION_S.get(unit, 1.0)


def parse_rate(text: str) -> float:
    """Bits per second from `"20Mbit/s"`, `"1.5 Gbit/s"` or `"80M"`. Raises UsageError for anything else."""
    match = _RATE.fullmatch(text)
    rate = float(match.group(1)) * _SCALE[match.group(2)] if match else 0.0
    if rate <= 0:
        raise UsageError(f"{text!r} is not a rate", next="write for example 20Mbit/s or 1.5 Gbit/s")
    return rate


def format_bytes(count: float) -> str:
    """`1536` as `1.5 kB` (powers of 1000)."""
    if abs(count) < 999.5:
        return f"{count:.0f} B"
    number, unit = _scaled(count / 1000, ("kB", "MB", "GB", "TB"), below=999.95)
    return f"{number:.1f} {unit}"


def format_count(count: float) -> str:
    """`1234567` as `1.2M`."""
    if abs(count) < 999.5:
        return f"{count:.0f}"
    number, unit = _scaled(count / 1000, ("k", "M", "G", "T"), below=999.95)
    return f"{number:.1f}{unit}"


def format_duration(seconds: float) -> str:
    """`0.25` as `250 ms`, `75` as `1 min 15 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def format_rate(bits_per_s: float) -> str:
    """`50e6` as `50 Mbit/s`."""
    number, unit = _scaled(bits_per_s, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"), below=999.5)
    return f"{number:.3g} {unit}"


def _scaled(number: float, units: tuple[str, ...], *, below: float) -> tuple[float, str]:
    """Divide by 1000 until the number is below `below`, from where on it would be printed with four digits."""
    for unit in units[:-1]:
        if abs(number) < below:
            return number, unit
        number /= 1000
    return number, units[-1]

"""Scales of charts: numbers to pixels, and round numbers to write beside them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear or logarithmic scale from `low` to `high`, drawn from pixel `begin` to pixel `end`."""

    low: float
    high: float
    begin: float
    end: float
    base: float = 0.0
    """Of the logarithm; 0: linear."""

    def at(self, value: float) -> float:
        """Its pixel; what is outside is put on the edge."""
        low, high, value = self._scaled(self.low), self._scaled(self.high), self._scaled(value)
        share = 0.5 if high == low else (value - low) / (high - low)
        return round(self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin), 1)

    def ticks(self, count: int = 5) -> list[float]:
        """About so many round numbers inside."""
        if self.base:
            first, last = math.ceil(self._scaled(self.low) - 1e-9), math.floor(self._scaled(self.high) + 1e-9)
            stride = max(1, math.ceil((last - first + 1) / count))
            return [self.base**power for power in range(first, last + 1, stride)] or [self.low]
        if self.high <= self.low:
            return [self.low]
        stride = _round_stride((self.high - self.low) / count)
        first = math.ceil(self.low / stride - 1e-9)
        return [number * stride for number in range(first, math.floor(self.high / stride + 1e-9) + 1)]

    def _scaled(self, value: float) -> float:
        return math.log(max(value, 1e-300), self.base) if self.base else value


def axis_of(values: Iterable[float], *, begin: float, end: float, base: float = 0.0) -> Axis:
    """An axis that holds all values (of a logarithm: all positive ones)."""
    kept = [value for value in values if value > 0 or not base]
    low, high = (min(kept), max(kept)) if kept else (1.0, 1.0)
    if low == high:
        low, high = (low / base, high * base) if base else (low - abs(low) / 2 - 1e-12, high + abs(high) / 2 + 1e-12)
    return Axis(low=low, high=high, begin=begin, end=end, base=base)


def number_text(value: float) -> str:
    """Short: 0.001, 2.5, 65536, 1e-07."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"


def seconds_text(value: float) -> str:
    """`5 s`, `2 min`, `1.5 h`."""
    unit: Callable[[float, str], str] = lambda number, name: f"{number:.3g} {name}"  # noqa: E731 - three uses below
    if value < 120:
        return unit(value, "s")
    return unit(value / 60, "min") if value < 7200 else unit(value / 3600, "h")


def _round_stride(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least so large."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))

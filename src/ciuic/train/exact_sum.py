"""Sums of floating-point numbers without rounding: the order and the grouping of the terms make no difference.

A double is a whole number times 2^-1074; a weight is a whole number. So a sum of weighted doubles is a Python integer
in units of 2^-1074, of at most a few thousand bits.
"""

import math
from dataclasses import dataclass

_UNIT_BITS = 1074
_LIMIT_BITS = 8192
"""2^1024 terms of weight 2^1024 would fit: more is not from us."""


@dataclass(kw_only=True)
class ExactSum:
    """A weighted sum. `+=`-like by `add` and `merge`; `mean()` rounds once, to the nearest double."""

    units: int = 0
    weight: int = 0
    not_finite: int = 0
    """Terms that were infinite or not a number; with one the mean is not a number."""

    def add(self, value: float, weight: int) -> None:
        """`weight` terms of `value`."""
        self.weight += weight
        if not math.isfinite(value):
            self.not_finite += 1
            return
        numerator, denominator = value.as_integer_ratio()
        self.units += (numerator << (_UNIT_BITS + 1 - denominator.bit_length())) * weight

    def merge(self, other: "ExactSum") -> None:
        """All terms of another sum."""
        self.units += other.units
        self.weight += other.weight
        self.not_finite += other.not_finite

    def mean(self) -> float:
        """Weighted mean; NaN when there is no weight, or a term was not finite."""
        if self.not_finite or not self.weight:
            return math.nan
        return self.units / (self.weight << _UNIT_BITS)  # Python rounds a quotient of integers correctly

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"units": f"{self.units:x}", "weight": f"{self.weight:x}", "not_finite": self.not_finite}

    @classmethod
    def from_dict(cls, body: dict[str, object]) -> "ExactSum":
        """From outside. Raises ValueError."""
        units, weight, not_finite = (body.get(name) for name in ("units", "weight", "not_finite"))
        texts = [text for text in (units, weight) if isinstance(text, str) and len(text) <= _LIMIT_BITS // 4]
        if len(texts) != 2 or isinstance(not_finite, bool) or not isinstance(not_finite, int) or not_finite < 0:
            raise ValueError("this is not a sum")
        found = cls(units=int(texts[0], 16), weight=int(texts[1], 16), not_finite=not_finite)
        if found.weight < 0:
            raise ValueError("a weight cannot be negative")
        return found

"""What counts as finite."""

import numpy as np
from numpy.typing import NDArray

LARGEST = 2.0**100
"""Magnitudes beyond this count as not finite: a few sums or one product of such values would be infinite."""


def first_non_finite(values: NDArray[np.float32]) -> int | None:
    """Index of the first infinity, NaN or value beyond LARGEST of [n], or None. The common case costs one dot product.

    A finite sum of squares proves that all are below LARGEST; a larger sum is then looked at value by value.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(values, values)):
            return None
        bad = ~(np.abs(values) <= LARGEST)
    index = int(np.argmax(bad))
    return index if bad[index] else None

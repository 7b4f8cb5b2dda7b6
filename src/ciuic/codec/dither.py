"""Stochastic rounding without state: the noise of element i under a seed is a hash, equal on every back end.

    key0, key1 = low and high half of splitmix64(seed)
    h = (i mod 2^32) + key0
    h = (h ^ h >> 16) * 0x7feb352d          lowbias32 (Chris Wellons), with the second key between its two rounds;
    h = ((h ^ h >> 15) + key1) * 0x846ca68b     all arithmetic modulo 2^32
    u = (2 ((h ^ h >> 16) >> 16) + 1) / 2^17    17 bits, never 0 or 1, mean exactly 1/2

floor(x / scale + u) then has the mean x / scale, and a whole x / scale stays what it is.
"""

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def dither_keys(seed: int) -> tuple[int, int]:
    """The two 32-bit keys of a seed (any integer, taken modulo 2^64)."""
    state = (seed + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    state ^= state >> 31
    return state & 0xFFFFFFFF, state >> 32


def uniform_noise(start: int, count: int, keys: tuple[int, int]) -> NDArray[np.float32]:
    """u of elements start..start+count of a section, fp32 [count] in (0, 1)."""
    h = np.arange(start, start + count, dtype=np.int64).astype(np.uint32)
    h += np.uint32(keys[0])
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h += np.uint32(keys[1])
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    noise = (h >> np.uint32(16)).astype(np.float32)
    noise *= np.float32(2.0**-16)
    noise += np.float32(2.0**-17)
    return noise

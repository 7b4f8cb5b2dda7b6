"""One global order of the samples: a keyed permutation with random access and nothing stored.

A Feistel network over the next even power of two, walked in cycles until the result is inside [0, size)
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Not a cipher: it only has to look shuffled.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6


class Permutation:
    """A bijection of [0, size), another one for each epoch, equal on every machine."""

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self.size = size
        self.seed = seed
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)

    def __call__(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample numbers of the run [n] (>= 0, epochs one after the other) -> indices into the data set [n]."""
        epochs, places = np.divmod(np.asarray(samples, np.int64), self.size)
        result = self._network(places.astype(np.uint64), epochs.astype(np.uint64))
        outside = result >= self.size
        while outside.any():
            result[outside] = self._network(result[outside], epochs[outside].astype(np.uint64))
            outside = result >= self.size
        return result.astype(np.int64)

    def _network(self, places: NDArray[np.uint64], epochs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = places >> bits, places & mask
        for number in range(_ROUNDS):
            key = _mix(epochs * np.uint64(0x9E3779B97F4A7C15) + np.uint64((self.seed * 0x100 + number) % 2**64))
            left, right = right, left ^ (_mix(right + key) & mask)
        return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

"""Where flat vectors live. The ledger's machines are written once against this face.

`NumpyVectors` keeps them on the host; `ciuic.train.torch_codec.TorchVectors` on any torch device. Arithmetic is by
operators (`-=`, `+=`), which both round once per operation in fp32.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ciuic.codec.payload import FragmentCodec, FragmentShape

LARGEST = 2.0**100
"""Magnitudes beyond this count as not finite: a few sums or one product of such values would be infinite."""

Vector = Any
"""An fp32 vector of the back end: numpy.ndarray or torch.Tensor, [n]."""


class VectorCodec(Protocol):
    """A FragmentCodec over the vectors of one back end. Payloads are host bytes."""

    payload_bytes: int

    def encode(self, values: Vector) -> NDArray[np.uint8]: ...

    def decode(self, payload: NDArray[np.uint8], out: Vector | None = None) -> Vector: ...


class Vectors(Protocol):
    """A place for fp32 vectors."""

    def zeros(self, count: int) -> Vector: ...

    def copy(self, values: Vector) -> Vector: ...

    def from_host(self, values: NDArray[np.float32]) -> Vector: ...

    def to_host(self, values: Vector) -> NDArray[np.float32]: ...

    def first_non_finite(self, values: Vector) -> int | None:
        """Index of the first infinity, NaN or value beyond LARGEST, or None."""
        ...

    def codec(self, name: str, shape: FragmentShape) -> VectorCodec: ...


class NumpyVectors:
    """Vectors on the host."""

    def zeros(self, count: int) -> NDArray[np.float32]:
        return np.zeros(count, np.float32)

    def copy(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values.copy()

    def from_host(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values.copy()

    def to_host(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values

    def first_non_finite(self, values: NDArray[np.float32]) -> int | None:
        return first_non_finite(values)

    def codec(self, name: str, shape: FragmentShape) -> FragmentCodec:
        return FragmentCodec(name, shape)


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

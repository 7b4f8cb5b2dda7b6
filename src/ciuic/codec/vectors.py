"""Where flat vectors live. The ledger's machines are written once against this face.

`NumpyVectors` keeps them on the host; `ciuic.train.torch_codec.TorchVectors` on any torch device. Arithmetic is by
operators (`-=`, `+=`), which both round once per operation in fp32.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ciuic.codec.finite import LARGEST, first_non_finite
from ciuic.codec.payload import FragmentCodec, FragmentShape

__all__ = ["LARGEST", "NumpyVectors", "Vector", "VectorCodec", "Vectors", "first_non_finite"]

ALIGNMENT = 64
"""Bytes: whole cache lines can be written without reading them."""

Vector = Any
"""An fp32 vector of the back end: numpy.ndarray or torch.Tensor, [n]."""


class VectorCodec(Protocol):
    """A FragmentCodec over the vectors of one back end. Payloads are host bytes."""

    payload_bytes: int

    def check_size(self, payload_bytes: int) -> None: ...

    def encode(self, values: Vector, *, dither: int | None = None) -> NDArray[np.uint8]: ...

    def compress(self, minus_d: Vector, e: Vector, e_next: Vector) -> tuple[NDArray[np.uint8], int | None]: ...

    def decode(self, payload: NDArray[np.uint8], out: Vector | None = None) -> Vector: ...

    def accumulate(self, payload: NDArray[np.uint8], weight: np.float32, out: Vector) -> None: ...


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
        return _aligned(np.zeros(4 * count + ALIGNMENT, np.uint8), count)

    def copy(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        taken = _aligned(np.empty(4 * len(values) + ALIGNMENT, np.uint8), len(values))
        taken[:] = values
        return taken

    def from_host(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.copy(values)

    def to_host(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values

    def first_non_finite(self, values: NDArray[np.float32]) -> int | None:
        return first_non_finite(values)

    def codec(self, name: str, shape: FragmentShape) -> FragmentCodec:
        return FragmentCodec(name, shape)


def _aligned(memory: NDArray[np.uint8], count: int) -> NDArray[np.float32]:
    """fp32 [count] at a multiple of ALIGNMENT inside this memory."""
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + 4 * count].view(np.float32)

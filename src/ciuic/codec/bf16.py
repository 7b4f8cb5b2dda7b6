"""bfloat16 without a dtype for it: round to nearest even, as torch does, and never past the largest finite value."""

import numpy as np
from numpy.typing import NDArray

BF16_MAX = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])
"""Largest finite bfloat16, 3.3895e38."""


def bf16_encode(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite fp32 values [n] as bfloat16 bits [n]; what would round to infinity becomes the largest finite value."""
    clipped = np.clip(values, -BF16_MAX, BF16_MAX).view(np.uint32)
    rounded = clipped + (((clipped >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def bf16_encode_up(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The next bfloat16 bits [n] that are not smaller, of fp32 values [n] from 0 to BF16_MAX."""
    return ((np.ascontiguousarray(values).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def bf16_decode(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bits [n] as fp32 [n], exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

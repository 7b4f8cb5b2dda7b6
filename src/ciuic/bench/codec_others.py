"""What people use instead of the codecs, written from the descriptions, for the same vector."""

import numpy as np
import torch
from torch import Tensor


class DeepSpeedOneBit:
    """The tensor operations of DeepSpeed's 1-bit optimizers: one scale for the whole tensor, feedback, packed signs.

    The error is added, the scale is the norm over the square root of the count, the error becomes what the signs times
    the scale leave, and the signs are packed to bytes. Each is an operation over the whole tensor.
    """

    def __init__(self, elements: int) -> None:
        self._error = torch.zeros(elements)
        self._packed = np.zeros(elements // 8, np.uint8)
        self._scale = torch.zeros(())

    def compress(self, values: Tensor) -> np.ndarray:
        """fp32 [n] -> packed signs [n / 8]."""
        compensated = values + self._error
        self._scale = compensated.norm() / len(values) ** 0.5
        signs = (compensated.sign() + 1).bool()
        self._error = compensated - self._scale * ((signs.float() - 0.5) * 2)
        self._packed = np.packbits(signs.numpy())
        return self._packed

    def decode(self) -> Tensor:
        """The last packed signs -> fp32 [n]."""
        signs = torch.from_numpy(np.unpackbits(self._packed)).float()
        return (signs * 2 - 1) * self._scale


def torch_top_k_of_blocks(values: Tensor, block: int, kept: int) -> tuple[Tensor, Tensor]:
    """Signed values and indices of the largest magnitudes of each block; no packing, no feedback."""
    rows = values.view(-1, block)
    places = torch.topk(rows.abs(), kept, dim=1, sorted=False).indices
    return rows.gather(1, places), places


def torch_top_k_global(values: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """The same over the whole vector."""
    places = torch.topk(values.abs(), kept, sorted=False).indices
    return values[places], places

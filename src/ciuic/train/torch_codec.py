"""The codecs on any torch device: the same bytes decode to the same bits as in numpy.

Encoding follows `ciuic.codec.scalar` step by step; a mean on another device may differ in the last bit of a scale,
and then only in the bytes that are sent: everybody decodes what was sent. Packing happens on the device, so that
only the packed bytes cross to the host.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciuic.codec import FragmentCodec, FragmentShape
from ciuic.codec.bf16 import BF16_MAX
from ciuic.codec.scalar import Bf16Codec, IntegerCodec, NoneCodec, OneBitCodec
from ciuic.codec.vectors import LARGEST
from ciuic.errors import CodecUnavailableError

Bytes = NDArray[np.uint8]


class TorchVectors:
    """fp32 vectors on a torch device; see ciuic.codec.Vectors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float32, device=self.device)

    def copy(self, values: Tensor) -> Tensor:
        return values.clone()

    def from_host(self, values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values.copy()).to(self.device)

    def to_host(self, values: Tensor) -> NDArray[np.float32]:
        return values.cpu().numpy()

    def first_non_finite(self, values: Tensor) -> int | None:
        bad = ~(values.abs() <= LARGEST)
        return int(bad.to(torch.uint8).argmax()) if bool(bad.any()) else None

    def codec(self, name: str, shape: FragmentShape) -> "TorchFragmentCodec":
        return TorchFragmentCodec(name, shape, self.device)


class TorchFragmentCodec:
    """FragmentCodec over torch tensors; payloads are host bytes."""

    def __init__(self, name: str, shape: FragmentShape, device: torch.device) -> None:
        self._host = FragmentCodec(name, shape)
        self.payload_bytes = self._host.payload_bytes
        self.device = device
        self._lengths = torch.from_numpy(self._host.blocks.lengths).to(device)

    def encode(self, values: Tensor) -> Bytes:
        """Finite fp32 [element_count] -> bytes [payload_bytes]."""
        shape = self._host.shape
        coded, small = shape.coded_count, shape.coded_count + shape.small_count
        half = self._host.scalar.small_bytes == 2
        sections = [
            self._encode_coded(values[:coded]),
            _bytes(_to_bf16(values[coded:small]) if half else values[coded:small]),
            _bytes(values[small:]),
        ]
        return torch.cat(sections).cpu().numpy()

    def decode(self, payload: Bytes, out: Tensor | None = None) -> Tensor:
        """Bytes [payload_bytes] -> fp32 [element_count]. Raises FrameError for any other size."""
        self._host.check_size(len(payload))
        shape, coded_bytes = self._host.shape, self._host.coded_bytes
        data = torch.from_numpy(np.array(payload)).to(self.device)
        small_end = coded_bytes + self._host.scalar.small_bytes * shape.small_count
        kind = torch.bfloat16 if self._host.scalar.small_bytes == 2 else torch.float32
        sections = [
            self._decode_coded(data[:coded_bytes]),
            _values(data[coded_bytes:small_end], kind).to(torch.float32),
            _values(data[small_end:], torch.float32),
        ]
        if out is None:
            return torch.cat(sections)
        return torch.cat(sections, out=out)

    # ---- the coded section

    def _encode_coded(self, values: Tensor) -> Tensor:
        scalar = self._host.scalar
        if isinstance(scalar, NoneCodec):
            return _bytes(values)
        if isinstance(scalar, Bf16Codec):
            return _bytes(_to_bf16(values))
        if isinstance(scalar, OneBitCodec):
            packed = _pack_bits(values >= 0)
            sums = _reduce(values.abs().double(), "sum", self._lengths)
            means = torch.clamp(sums / self._lengths, max=BF16_MAX).float()
            return torch.cat([packed, _bytes(_to_bf16(means))])
        if isinstance(scalar, IntegerCodec):
            return self._encode_integers(values, scalar)
        raise CodecUnavailableError(f"codec {self._host.name!r} has no torch back end", next="choose another codec")

    def _encode_integers(self, values: Tensor, scalar: IntegerCodec) -> Tensor:
        largest = _reduce(values.abs(), "max", self._lengths)
        scale_bits = _to_bf16(torch.clamp(largest / scalar.levels, max=float(scalar.scale_limit())))
        scales = scale_bits.float()
        divisor = self._spread(torch.where(scales > 0, scales, torch.ones_like(scales)))
        codes = torch.clamp(torch.round(values / divisor), -scalar.levels, scalar.levels).to(torch.int8)
        if scalar.bits == 8:
            packed = codes.view(torch.uint8)
        else:
            shifted = (codes + 8).view(torch.uint8)
            if len(shifted) % 2:
                shifted = torch.cat([shifted, shifted.new_full((1,), 8)])
            packed = shifted[0::2] | (shifted[1::2] << 4)
        return torch.cat([packed, _bytes(scale_bits)])

    def _decode_coded(self, data: Tensor) -> Tensor:
        scalar, count = self._host.scalar, self._host.blocks.element_count
        if isinstance(scalar, NoneCodec):
            return _values(data, torch.float32)
        if isinstance(scalar, Bf16Codec):
            return _values(data, torch.bfloat16).float()
        bits = scalar.bits if isinstance(scalar, IntegerCodec) else 1
        packed_bytes = (count * bits + 7) // 8
        scales = self._spread(_values(data[packed_bytes:], torch.bfloat16).float())
        packed = data[:packed_bytes]
        if bits == 1:
            return torch.where(_unpack_bits(packed, count), scales, -scales)
        if bits == 8:
            return scales * packed.view(torch.int8)
        codes = torch.stack([packed & 15, packed >> 4], dim=1).reshape(-1)[:count].view(torch.int8) - 8
        return scales * codes

    def _spread(self, scales: Tensor) -> Tensor:
        return torch.repeat_interleave(scales, self._lengths, output_size=self._host.blocks.element_count)


def _reduce(values: Tensor, how: str, lengths: Tensor) -> Tensor:
    """[n] values reduced over consecutive segments."""
    return torch.segment_reduce(values, how, lengths=lengths, unsafe=True)  # ty: ignore[missing-attribute]


def _to_bf16(values: Tensor) -> Tensor:
    return torch.clamp(values, -BF16_MAX, BF16_MAX).to(torch.bfloat16)


def _bytes(values: Tensor) -> Tensor:
    if not len(values):  # torch may give it a stride of 0, which has no view of another type
        return values.new_empty(0, dtype=torch.uint8)
    return values.contiguous().view(torch.uint8)


def _values(data: Tensor, kind: torch.dtype) -> Tensor:
    if not len(data):
        return data.new_empty(0, dtype=kind)
    return data.clone().view(kind)  # a copy is always aligned


def _pack_bits(bits: Tensor) -> Tensor:
    """[n] bool -> [(n + 7) // 8] uint8, little-endian."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, count: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).reshape(-1)[:count].bool()

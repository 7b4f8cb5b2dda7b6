"""Bits, bfloat16 and noise on a torch device, equal to those of `ciuic.codec`."""

import torch
from torch import Tensor

from ciuic.codec.bf16 import BF16_MAX
from ciuic.codec.section import Keys


def to_bf16(values: Tensor) -> Tensor:
    """Nearest even, never infinite."""
    return torch.clamp(values, -BF16_MAX, BF16_MAX).to(torch.bfloat16)


def to_bf16_up(values: Tensor) -> Tensor:
    """The next bfloat16 that is not smaller, of fp32 [n] from 0 to BF16_MAX."""
    return (((values.contiguous().view(torch.int32) + 0xFFFF) >> 16).to(torch.int16)).view(torch.bfloat16)


def as_bytes(values: Tensor) -> Tensor:
    """The memory of [n] values as uint8."""
    if not len(values):  # torch may give it a stride of 0, which has no view of another type
        return values.new_empty(0, dtype=torch.uint8)
    return values.contiguous().view(torch.uint8)


def as_values(data: Tensor, kind: torch.dtype) -> Tensor:
    """Bytes at any address as values of a type."""
    if not len(data):
        return data.new_empty(0, dtype=kind)
    return data.clone().view(kind)  # a copy is always aligned


def pack_bits(bits: Tensor) -> Tensor:
    """[n] bool -> [(n + 7) // 8] uint8, the first in the lowest bit."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The reverse, bool [count]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).reshape(-1)[:count].bool()


def pack_twos(codes: Tensor) -> Tensor:
    """[n] uint8 below 4 -> [(n + 3) // 4] uint8, the first in the lowest bits."""
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    return padded[:, 0] | padded[:, 1] << 2 | padded[:, 2] << 4 | padded[:, 3] << 6


def unpack_twos(packed: Tensor, count: int) -> Tensor:
    """The reverse, uint8 [count]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 3).reshape(-1)[:count]


def pack_indices(places: Tensor) -> Tensor:
    """[k] numbers of 12 bits -> [(12 k + 7) // 8] uint8, the first in the lowest bits."""
    pairs = torch.nn.functional.pad(places, (0, len(places) % 2)).view(-1, 2)
    words = pairs[:, 0] | pairs[:, 1] << 12
    packed = torch.stack([words & 255, words >> 8 & 255, words >> 16], dim=1).to(torch.uint8).reshape(-1)
    return packed[: (12 * len(places) + 7) // 8]


def unpack_indices(packed: Tensor, count: int) -> Tensor:
    """The reverse, int64 [count]."""
    triples = torch.nn.functional.pad(packed, (0, -len(packed) % 3)).view(-1, 3).long()
    words = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
    return torch.stack([words & 4095, words >> 12], dim=1).reshape(-1)[:count]


def uniform_noise(start: int, count: int, keys: Keys, device: torch.device) -> Tensor:
    """As ciuic.codec.dither.uniform_noise. int32 arithmetic wraps; shifts are made logical by masks."""
    h = _as_int32(torch.arange(start, start + count, device=device) + keys[0])
    h ^= (h >> 16) & 0xFFFF
    h *= _signed(0x7FEB352D)
    h ^= (h >> 15) & 0x1FFFF
    h += _signed(keys[1])
    h *= _signed(0x846CA68B)
    h ^= (h >> 16) & 0xFFFF
    return ((h >> 16) & 0xFFFF).float() * 2.0**-16 + 2.0**-17


def _as_int32(values: Tensor) -> Tensor:
    """int64 modulo 2^32, as int32."""
    return (((values & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _signed(value: int) -> int:
    return (value ^ 0x80000000) - 0x80000000

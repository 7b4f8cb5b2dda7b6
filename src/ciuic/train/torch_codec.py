"""The codecs on any torch device: the same bytes decode to the same bits as in numpy.

Encoding follows `ciuic.codec` step by step; a mean on another device may differ in the last bit of a scale, and then
only in the bytes that are sent: everybody decodes what was sent. Packing happens on the device, so that only the
packed bytes cross to the host. Work goes span by span, which bounds the memory for intermediate results.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciuic.codec import FragmentCodec, FragmentShape
from ciuic.codec.section import Keys
from ciuic.codec.vectors import LARGEST
from ciuic.train.torch_section import TorchSection

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
        """Raises CodecUnavailableError."""
        self._host = FragmentCodec(name, shape, back_end="fallback")
        self.payload_bytes = self._host.payload_bytes
        self.device = device
        self._sections = [TorchSection(section, device) for section in self._host.sections]

    @torch.no_grad()
    def encode(self, values: Tensor, *, dither: int | None = None) -> Bytes:
        """Finite fp32 [element_count] -> bytes [payload_bytes]; `dither` as in FragmentCodec.encode."""
        keys = self._host.dither_keys(dither)
        payload = self._empty_payload()
        for section in self._sections:
            for number, (start, stop) in enumerate(section.ranges):
                section.encode(number, values[start:stop], payload, self._keys_for(section, keys))
        return payload.cpu().numpy()

    @torch.no_grad()
    def compress(self, minus_d: Tensor, e: Tensor, e_next: Tensor) -> tuple[Bytes, int | None]:
        """x = e - minus_d, payload = encode(x), e_next = x - decode(payload); see FragmentCodec.compress."""
        payload = self._empty_payload()
        sound = torch.ones((), dtype=torch.bool, device=self.device)
        for section in self._sections:
            for number, (start, stop) in enumerate(section.ranges):
                x = e[start:stop] - minus_d[start:stop]
                sound &= (x.abs() <= LARGEST).all()
                section.encode(number, x, payload, None)
                torch.sub(x, section.decode(number, payload), out=e_next[start:stop])
        packed = payload.cpu().numpy()
        return packed, None if bool(sound) else self._first_bad(minus_d, e)

    @torch.no_grad()
    def decode(self, payload: Bytes, out: Tensor | None = None) -> Tensor:
        """Bytes [payload_bytes] -> fp32 [element_count]. Raises FrameError for any other size."""
        data = self._to_device(payload)
        values = torch.empty(self._host.shape.element_count, device=self.device) if out is None else out
        for section in self._sections:
            for number, (start, stop) in enumerate(section.ranges):
                values[start:stop] = section.decode(number, data)
        return values

    @torch.no_grad()
    def accumulate(self, payload: Bytes, weight: np.float32, out: Tensor) -> None:
        """out += weight * decoded; product and sum are each rounded once. Raises FrameError for another size."""
        data = self._to_device(payload)
        for section in self._sections:
            for number, (start, stop) in enumerate(section.ranges):
                out[start:stop] += section.decode(number, data) * float(np.float32(weight))

    def check_size(self, payload_bytes: int) -> None:
        """Raises FrameError for any size but the formula's."""
        self._host.check_size(payload_bytes)

    def _empty_payload(self) -> Tensor:
        return torch.empty(self.payload_bytes, dtype=torch.uint8, device=self.device)

    def _to_device(self, payload: Bytes) -> Tensor:
        self.check_size(len(payload))
        return torch.from_numpy(np.array(payload)).to(self.device)

    def _keys_for(self, section: TorchSection, keys: Keys | None) -> Keys | None:
        return keys if section.dithers else None

    def _first_bad(self, minus_d: Tensor, e: Tensor) -> int | None:
        for section in self._sections:
            for start, stop in section.ranges:
                bad = ~((e[start:stop] - minus_d[start:stop]).abs() <= LARGEST)
                if bool(bad.any()):
                    return start + int(bad.to(torch.uint8).argmax())
        return None

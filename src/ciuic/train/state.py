"""Between a torch model and the ledger's flat vectors: the layout of a model, gather, scatter."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ciuic.codec import NumpyVectors, Vectors
from ciuic.errors import ModelError
from ciuic.ledger.layout import MAX_COUNTERS, Layout, make_layout, section_of
from ciuic.ledger.layout import Tensor as Spec
from ciuic.train.torch_codec import TorchVectors

_ROUTER = re.compile(r"(^|\.)(router|gate)\.weight$")
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


class ModelState:
    """The tensors of a model that training changes, in the ledger's order, and one flat vector `theta` for them.

    Trainable parameters, persistent floating-point buffers (BatchNorm statistics, expert biases) and integer
    buffers (counters). Frozen parameters are not sent: every node loads them itself. Tied parameters count once.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """`device`: where the flat vectors live; the host, or the model's own device."""
        tensors = dict(_tensors(model))
        if not any(spec.trainable for spec, _ in tensors.values()):
            raise ModelError("the model has no trainable parameter", next="unfreeze what should be trained")
        self.layout: Layout = make_layout([spec for spec, _ in tensors.values()])
        self.device = device
        self.vectors: Vectors = NumpyVectors() if device.type == "cpu" else TorchVectors(device)
        members = [tensors[spec.name][1] for spec in self.layout.of_fragment(0)]
        self._counters = [tensors[spec.name][1] for spec in self.layout.counters()]
        self._live = [tensor.detach() for tensor in members]
        self.frozen_digest = _frozen_digest(model)
        self._flat = torch.empty(sum(t.numel() for t in members), dtype=torch.float32, device=device)
        self._views = list(_views(self._flat, self._live))
        pairs = list(zip(self._views, self._live, strict=True))
        self._exact_views = [view for view, live in pairs if live.dtype == torch.float32]
        self._exact = [live for live in self._live if live.dtype == torch.float32]
        self._masters = [view for view, live in pairs if live.dtype != torch.float32]
        self._rounded = [live for live in self._live if live.dtype != torch.float32]
        self._last = [live.clone() for live in self._rounded]
        with torch.no_grad():
            for view, live in pairs:
                view.copy_(live)

    @property
    def theta(self) -> Any:
        """The flat vector [element_count] of the back end; shares memory with what gather and scatter use."""
        return self._flat.numpy() if self.device.type == "cpu" else self._flat

    @torch.no_grad()
    def gather(self) -> Any:
        """Model -> theta. A tensor of lower precision moves its fp32 master by what the training changed in it."""
        if self._exact:
            torch._foreach_copy_(self._exact_views, self._exact)
        for master, live, last in zip(self._masters, self._rounded, self._last, strict=True):
            master += live.to(torch.float32) - last.to(torch.float32)
            last.copy_(live)
        return self.theta

    @torch.no_grad()
    def scatter(self) -> None:
        """theta -> model."""
        torch._foreach_copy_(self._live, self._views)
        if self._last:
            torch._foreach_copy_(self._last, self._rounded)

    @contextmanager
    def holding(self, values: Any) -> Iterator[None]:
        """The model holds these values [element_count] meanwhile, then theta again (which must be up to date)."""
        saved = self._flat.clone()
        self.theta[:] = values
        self.scatter()
        try:
            yield
        finally:
            self._flat.copy_(saved)
            self.scatter()

    @property
    def flat(self) -> Tensor:
        """theta as a torch tensor (for broadcasts inside a node)."""
        return self._flat

    def counters(self) -> tuple[int, ...]:
        """Integer buffers, in layout order."""
        return tuple(int(v) for tensor in self._counters for v in tensor.reshape(-1).tolist())

    @torch.no_grad()
    def raise_counters(self, values: tuple[int, ...]) -> None:
        """Integer buffers become the maximum of theirs and these."""
        place = 0
        for tensor in self._counters:
            count = tensor.numel()
            new = torch.tensor(values[place : place + count], dtype=tensor.dtype, device=tensor.device)
            tensor.copy_(torch.maximum(tensor, new.view(tensor.shape)))
            place += count


def _frozen_digest(model: nn.Module) -> str:
    """Hex digest (xxh3) of the parameters that are not trained; "" when all are."""
    digest, any_frozen = xxhash.xxh3_128(), False
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            any_frozen = True
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest() if any_frozen else ""


def _views(flat: Tensor, tensors: list[Tensor]) -> Iterator[Tensor]:
    place = 0
    for tensor in tensors:
        yield flat[place : place + tensor.numel()].view(tensor.shape)
        place += tensor.numel()


def _tensors(model: nn.Module) -> Iterator[tuple[str, tuple[Spec, Tensor]]]:
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            section = section_of(parameter.shape, is_router=_ROUTER.search(name) is not None)
            rows = id(parameter) in embeddings or (parameter.dim() >= 3 and _EXPERTS.search(name) is not None)
            yield name, (_spec(name, parameter, section, rows), parameter)
    persistent = model.state_dict(keep_vars=True).keys()
    integers = 0
    for name, buffer in model.named_buffers():
        if name not in persistent or buffer.numel() == 0 or buffer.dtype == torch.bool or buffer.is_complex():
            continue
        if buffer.is_floating_point():
            yield name, (_spec(name, buffer, "buffer"), buffer)
        elif (integers := integers + buffer.numel()) <= MAX_COUNTERS:
            yield name, (_spec(name, buffer, "counter"), buffer)


def _spec(name: str, tensor: Tensor, section: Any, row_aligned: bool = False) -> Spec:
    return Spec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        section=section,
        trainable=section in ("coded", "small"),
        row_aligned=row_aligned,
    )

"""Between a torch model and the ledger's flat vectors: gather, scatter."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor, nn

from ciuic.codec import NumpyVectors, Vectors
from ciuic.job import FragmentBy
from ciuic.ledger.experts import experts_by_fragment
from ciuic.ledger.layout import Layout, Slice
from ciuic.ledger.layout import Tensor as Spec
from ciuic.train.routed import RoutedTokens
from ciuic.train.tensors import model_layout
from ciuic.train.torch_codec import TorchVectors


class ModelState:
    """The tensors of a model that training changes, in the ledger's order, and one flat vector `theta` for them.

    theta is fragment after fragment; `theta_of` is the part of one. Which tensors: see `model_layout`.
    """

    ranks = 1
    """Of the node: each of them trains on other samples."""
    is_sharded = False
    """Whether gather, scatter and a forward pass need every rank of the node (see `ShardedState`)."""

    def __init__(self, model: nn.Module, device: torch.device, fragments: int = 1, by: FragmentBy = "block") -> None:
        """`device`: where the flat vectors live; the host, or the model's own device. Raises ModelError."""
        self.layout: Layout
        self.layout, tensors = model_layout(model, fragments, by)
        self._experts = experts_by_fragment(self.layout) if by == "expert" else []
        self._routed = RoutedTokens(model, frozenset().union(*self._experts)) if self._experts else None
        self.device = device
        self.vectors: Vectors = NumpyVectors() if device.type == "cpu" else TorchVectors(device)
        members = [
            [self._member(tensors[spec.source].detach(), spec) for spec in self.layout.of_fragment(f)]
            for f in range(fragments)
        ]
        counts = [sum(tensor.numel() for tensor in part) for part in members]
        self._live = [tensor for part in members for tensor in part]
        self._counters = [tensors[spec.name] for spec in self.layout.counters()]
        self.frozen_digest = self._digest_of_frozen(model)
        self._flat = self._vector(sum(counts))
        self._parts: list[Part] = []
        with torch.no_grad():
            for part, flat in zip(members, self._flat.split(counts), strict=True):
                self._parts.append(self._part(flat, list(views_of(flat, part)), part))

    @property
    def theta(self) -> Any:
        """The flat vector [element_count] of the back end; shares memory with what gather and scatter use."""
        return self._flat.numpy() if self.device.type == "cpu" else self._flat

    def theta_of(self, fragment: int) -> Any:
        """The part of theta of one fragment (a view)."""
        flat = self._parts[fragment].flat
        return flat.numpy() if self.device.type == "cpu" else flat

    @torch.no_grad()
    def gather(self, fragment: int | None = None) -> Any:
        """Model -> theta (all of it, or one fragment), which is returned.

        A tensor of lower precision moves its fp32 master by what the training changed in it.
        """
        for part in self._chosen(fragment):
            part.gather()
        return self.theta if fragment is None else self.theta_of(fragment)

    @torch.no_grad()
    def scatter(self, fragment: int | None = None) -> None:
        """theta -> model (all of it, or one fragment)."""
        for part in self._chosen(fragment):
            part.scatter()

    @contextmanager
    def holding(self, values: Any) -> Iterator[None]:
        """The model holds these values [element_count] meanwhile, then its own again. theta is left alone."""
        saved = [live.clone() for live in self._live]
        with torch.no_grad():
            torch._foreach_copy_(self._live, list(views_of(torch.as_tensor(values), self._live)))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._live, saved)

    def accesses(self, fragment: int) -> int:
        """How often tokens reached experts of a fragment since this was last asked; -1: not known.

        Of a node with several ranks this one's count, times their number.
        """
        count = self._routed.take(self._experts[fragment]) if self._routed is not None else -1
        return self.ranks * count if count > 0 else count

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

    # ---- what a sharded model does in another way

    def _member(self, tensor: Tensor, spec: Spec) -> Any:
        """The tensor, or the rows of it that the layout means; shares its memory."""
        return tensor[spec.part.start : spec.part.stop] if isinstance(spec.part, Slice) else tensor

    def _vector(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.float32, device=self.device)

    def _part(self, flat: Tensor, views: list[Tensor], live: list[Tensor]) -> "Part":
        torch._foreach_copy_(views, live)
        return HeldPart(flat, views, live)

    def _digest_of_frozen(self, model: nn.Module) -> str:
        """Hex digest (xxh3) of the parameters that are not trained; "" when all are."""
        digest, any_frozen = xxhash.xxh3_128(), False
        for name, parameter in sorted(model.named_parameters()):
            if not parameter.requires_grad:
                any_frozen = True
                digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
                whole = self._whole(parameter.detach()).cpu().reshape(-1).contiguous()
                digest.update(whole.view(torch.uint8).numpy().data)
        return digest.hexdigest() if any_frozen else ""

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def _chosen(self, fragment: int | None) -> "list[Part]":
        return self._parts if fragment is None else [self._parts[fragment]]


class Shaped(Protocol):
    """A tensor, or what stands for rows of one."""

    @property
    def shape(self) -> torch.Size: ...

    def numel(self) -> int: ...


class Part(Protocol):
    """The tensors of one fragment, beside their places in the flat vector."""

    flat: Tensor

    def gather(self) -> None:
        """Tensors -> flat vector."""

    def scatter(self) -> None:
        """Flat vector -> tensors."""


class HeldPart:
    """A fragment whose tensors this process has."""

    def __init__(self, flat: Tensor, views: list[Tensor], live: list[Tensor]) -> None:
        self.flat, self.views, self.live = flat, views, live
        pairs = list(zip(views, live, strict=True))
        self._exact_views = [view for view, live in pairs if live.dtype == torch.float32]
        self._exact = [live for live in live if live.dtype == torch.float32]
        self._masters = [view for view, live in pairs if live.dtype != torch.float32]
        self._rounded = [live for live in live if live.dtype != torch.float32]
        self._last = [live.clone() for live in self._rounded]

    def gather(self) -> None:
        if self._exact:
            torch._foreach_copy_(self._exact_views, self._exact)
        for master, live, last in zip(self._masters, self._rounded, self._last, strict=True):
            master += live.to(torch.float32) - last.to(torch.float32)
            last.copy_(live)

    def scatter(self) -> None:
        torch._foreach_copy_(self.live, self.views)
        if self._last:
            torch._foreach_copy_(self._last, self._rounded)


def views_of(flat: Tensor, tensors: Sequence[Shaped]) -> Iterator[Tensor]:
    """The places [shape of each tensor] of these tensors in a flat vector that holds them one after the other."""
    place = 0
    for tensor in tensors:
        yield flat[place : place + tensor.numel()].view(tensor.shape)
        place += tensor.numel()

"""Looks at each module's inputs and outputs in forward, and at the gradients of the outputs in backward."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ciuic.doctor.loss.records import BINS, GRADIENT, INPUT, LOSS, OUTPUT, PARAMETER_GRADIENT, Seen
from ciuic.doctor.probe.digests import NONE, digest

SEEN_MAX = 50_000
_CHUNK = 1 << 20


class Recorder:
    """`with Recorder(model) as recorder:` run the model; then `recorder.seen`."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[Seen] = []
        self.left_out = 0
        """Tensors after the first SEEN_MAX."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._model = model
        self._stack: list[str] = []
        self._calls: dict[str, int] = {}
        self._handles: list[Any] = []
        self._sources: dict[int, tuple[Tensor, tuple[str, int, int]]] = {}
        """Outputs by their identity, and whose they are; held, so that no other tensor gets the same one."""
        self.is_forward = True
        """Modules that run again in backward, under checkpointing, are not looked at twice."""

    def __enter__(self) -> "Recorder":
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._sources.clear()

    def loss(self, loss: Tensor) -> None:
        """What the model was led to."""
        self._see(loss, ("loss", "", LOSS, 0, 0))

    def parameter_gradients(self, gradients: Iterable[tuple[str, Tensor | None]]) -> None:
        """By name, None where there is none."""
        for name, gradient in gradients:
            self._see(gradient, ("backward", name, PARAMETER_GRADIENT, 0, 0))

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self.is_forward:
            return
        path = self._paths[id(module)]
        call = self._calls.get(path, 0)
        for index, tensor in enumerate(_tensors((inputs, keywords))):
            self._see(tensor, ("forward", path, INPUT, call, index), source=self._sources.get(id(tensor)))
        self._calls[path] = call + 1
        self._stack.append(path)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self.is_forward:
            return
        path = self._stack.pop()
        call = self._calls[path] - 1
        for index, tensor in enumerate(_tensors(output)):
            self._see(tensor, ("forward", path, OUTPUT, call, index))
            self._sources.setdefault(id(tensor), (tensor, (path, call, index)))
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._gradient_seer(path, call, index))

    def _gradient_seer(self, path: str, call: int, index: int) -> Any:
        inside = self._stack[-1] if self._stack else ""

        def see(gradient: Tensor) -> None:
            self._see(gradient, ("backward", path, GRADIENT, call, index), inside)

        return see

    def _see(
        self,
        tensor: Tensor | None,
        key: tuple[str, str, str, int, int],
        inside: str = "",
        source: tuple[Tensor, tuple[str, int, int]] | None = None,
    ) -> None:
        if len(self.seen) >= SEEN_MAX:
            self.left_out += 1
            return
        direction, path, what, call, index = key
        norm, sketch = (0.0, b"") if tensor is None else measure(tensor)
        self.seen.append(
            Seen(
                direction=direction,
                path=path,
                what=what,
                call=call,
                index=index,
                digest=NONE if tensor is None else digest(tensor),
                dtype="none" if tensor is None else str(tensor.dtype).removeprefix("torch."),
                shape=() if tensor is None else tuple(tensor.shape),
                norm=norm,
                sketch=sketch,
                inside=inside or (self._stack[-1] if self._stack else ""),
                source=None if source is None else source[1],
            )
        )


def measure(tensor: Tensor) -> tuple[float, bytes]:
    """(length, sketch): BINS sums of the elements with fixed signs; a difference of sketches is as long as that of
    the tensors, on average. No sketch of what holds no floating numbers."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return 0.0, b""
    flat = tensor.reshape(-1)
    bins = torch.zeros(BINS, dtype=torch.float64, device=flat.device)
    square = torch.zeros((), dtype=torch.float64, device=flat.device)
    for at in range(0, flat.numel(), _CHUNK):
        part = flat[at : at + _CHUNK].double()
        square += part.square().sum()
        signed = part * _signs(at, part.numel(), flat.device)
        whole = signed.numel() // BINS * BINS
        bins += signed[:whole].view(-1, BINS).sum(0)
        bins[: signed.numel() - whole] += signed[whole:]
    return float(square.sqrt()), bins.cpu().numpy().astype("<f8").tobytes()


def _signs(start: int, count: int, device: torch.device) -> Tensor:
    """+1 and -1 by a hash of the place; no random state is touched."""
    at = torch.arange(start, start + count, dtype=torch.int64, device=device)
    mixed = (at * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    return 1.0 - 2.0 * ((mixed >> 16) & 1).double()


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(nest) if isinstance(leaf, Tensor) and leaf.device.type != "meta"]

"""A model that FSDP2 has spread over the ranks of a node, and the flat vector of the ledger on rank 0's host.

One parameter after the other goes to rank 0 and back (`DTensor.full_tensor`, `distribute_tensor`), so no rank holds
more than one parameter as a whole, and only rank 0 has theta. Each of these is a collective: rank 0 orders it, the
other ranks wait for orders in `Gang.decision` and do the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ciuic.errors import TrainingLoopError
from ciuic.job import FragmentBy
from ciuic.ledger.layout import Slice
from ciuic.ledger.layout import Tensor as Spec
from ciuic.train.gang import Gang, Order
from ciuic.train.sharding import check_sharding, is_sharded, reshard
from ciuic.train.state import ModelState, Part, views_of


def make_state(
    model: nn.Module, device: torch.device, gang: Gang, fragments: int = 1, by: FragmentBy = "block"
) -> ModelState:
    """The state of a model as it is: on every rank, or sharded over them (then all ranks call this together).

    `device`: of this rank. Raises ModelError for what cannot be synchronised.
    """
    check_sharding(model, gang.size)
    if is_sharded(model):
        return ShardedState(model, gang, fragments, by)
    where = device if next(model.parameters()).device.type == "cuda" else torch.device("cpu")
    state = ModelState(model, where, fragments, by)
    state.ranks = gang.size
    return state


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a tensor that is spread: it can only be put together as a whole."""

    tensor: Tensor
    start: int
    stop: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.stop - self.start, *self.tensor.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def numel(self) -> int:
        return self.shape.numel()


Live = Tensor | Rows


class ShardedState(ModelState):
    """See the module. theta, gather, scatter and holding are for rank 0; the other ranks `obey`.

    Buffers are not sharded: rank 0's are the node's.
    """

    is_sharded = True

    def __init__(self, model: nn.Module, gang: Gang, fragments: int = 1, by: FragmentBy = "block") -> None:
        """All ranks together."""
        self._gang, self._model = gang, model
        self.ranks = gang.size
        self._saved: list[tuple[Tensor, Tensor]] = []
        reshard(model)
        super().__init__(model, torch.device("cpu"), fragments, by)

    def gather(self, fragment: int | None = None) -> Any:
        """Model -> theta (all of it, or one fragment), which is returned."""
        self._do(Order(task="gather", fragment=fragment))
        return self.theta if fragment is None else self.theta_of(fragment)

    def scatter(self, fragment: int | None = None) -> None:
        """theta -> model on all ranks (all of it, or one fragment)."""
        self._do(Order(task="scatter", fragment=fragment))

    @contextmanager
    def holding(self, values: Any) -> Iterator[None]:
        """The model holds these values [element_count] on all ranks meanwhile, then its own again."""
        self._do(Order(task="hold"), torch.as_tensor(values))
        try:
            yield
        except BaseException:
            self._restore()  # no order: nobody knows which collective the other ranks are in
            raise
        self._do(Order(task="restore"))

    def _do(self, order: Order, values: Tensor | None = None) -> None:
        self._gang.order(order)
        self.obey(order, values)

    @torch.no_grad()
    def obey(self, order: Order, values: Tensor | None = None, evaluate: Callable[[], object] | None = None) -> None:
        """Take part in what rank 0 ordered. `values`: those to hold, on rank 0; `evaluate`: this rank's evaluation.

        Raises TrainingLoopError when this rank has none.
        """
        if order.task == "gather":
            for part in self._chosen(order.fragment):
                part.gather()
        elif order.task == "scatter":
            reshard(self._model)
            for part in self._chosen(order.fragment):
                part.scatter()
        elif order.task == "hold":
            self._hold(values)
        elif order.task == "restore":
            self._restore()
        elif evaluate is not None:
            evaluate()
        else:
            raise TrainingLoopError(
                "run.on_evaluate was called on rank 0 only",
                cause="the model is sharded, so its forward pass needs all ranks",
                next="call run.on_evaluate on every rank",
            )

    def _hold(self, values: Tensor | None) -> None:
        reshard(self._model)
        own = [_own(live) for live in self._live]
        kept = {part.data_ptr(): part for part in own if part.numel()}  # of several rows of one tensor: once
        self._saved = [(part, part.clone()) for part in kept.values()]
        flat = self._flat if values is None else values
        for live, view in zip(self._live, views_of(flat, self._live), strict=True):
            _put(live, view, self._gang)

    @torch.no_grad()
    def _restore(self) -> None:
        """Needs no other rank."""
        reshard(self._model)
        for own, saved in self._saved:
            own.copy_(saved)
        self._saved = []

    def _vector(self, count: int) -> Tensor:
        """On ranks without theta: shapes without memory."""
        return torch.empty(count, dtype=torch.float32, device="meta" if self._gang.rank else "cpu")

    def _member(self, tensor: Tensor, spec: Spec) -> Live:
        return Rows(tensor, spec.part.start, spec.part.stop) if isinstance(spec.part, Slice) else tensor

    def _part(self, flat: Tensor, views: list[Tensor], live: list[Any]) -> Part:
        return _SpreadPart(flat, views, live, self._gang)

    def _whole(self, tensor: Tensor) -> Tensor:
        return _whole(tensor)


class _SpreadPart:
    """A fragment whose tensors are spread over the ranks; its place in theta is on rank 0 (elsewhere on `meta`)."""

    def __init__(self, flat: Tensor, views: list[Tensor], live: list[Live], gang: Gang) -> None:
        self.flat, self._gang = flat, gang
        self._rows: list[tuple[Tensor, Live, Tensor | None]] = []
        for view, tensor in zip(views, live, strict=True):
            is_exact = tensor.dtype == torch.float32
            last = None if is_exact else torch.empty(tensor.shape, dtype=tensor.dtype, device=flat.device)
            whole = _whole(tensor)
            for copy in (view, last):
                if copy is not None and not copy.is_meta:
                    copy.copy_(whole)
            self._rows.append((view, tensor, last))

    def gather(self) -> None:
        for view, live, last in self._rows:
            whole = _whole(live)
            if view.is_meta:
                continue
            if last is None:
                view.copy_(whole)
            else:
                host = whole.to("cpu")
                view += host.to(torch.float32) - last.to(torch.float32)
                last.copy_(host)

    def scatter(self) -> None:
        for view, live, last in self._rows:
            _put(live, view, self._gang)
            if last is not None and not last.is_meta:
                last.copy_(view)


def _own(tensor: Live) -> Tensor:
    """What this rank has of it (shares memory); of rows: of the tensor they are of."""
    if isinstance(tensor, Rows):
        return _own(tensor.tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Live) -> Tensor:
    """The whole tensor, put together from all ranks (collective). Of a tensor that is not spread: this rank's."""
    if isinstance(tensor, Rows):
        return _whole(tensor.tensor)[tensor.start : tensor.stop]
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, own = tensor.device_mesh, tensor.to_local()
    if own.device.type != mesh.device_type:  # offloaded to the host, where the mesh's back end cannot reach it
        shape, stride = tensor.shape, tensor.stride()
        tensor = DTensor.from_local(own.to(mesh.device_type), mesh, tensor.placements, shape=shape, stride=stride)
    return tensor.full_tensor()


def _put(tensor: Live, value: Tensor, gang: Gang) -> None:
    """Rank 0's value [same shape, fp32] becomes the tensor's on all ranks (collective)."""
    if isinstance(tensor, Rows):
        whole = _whole(tensor.tensor).clone()  # the other rows go back as they are
        if not value.is_meta:
            whole[tensor.start : tensor.stop] = value.to(whole.device, whole.dtype)
        _put(tensor.tensor, whole.to("meta") if value.is_meta else whole, gang)
        return
    if not isinstance(tensor, DTensor):
        whole = torch.empty(value.shape) if value.is_meta else value.to("cpu").contiguous()
        gang.share(whole)
        tensor.copy_(whole)
        return
    mesh = tensor.device_mesh
    if value.is_meta:
        whole = torch.empty(value.shape, dtype=tensor.dtype, device=mesh.device_type)
    else:
        whole = value.to(mesh.device_type, tensor.dtype)
    tensor.to_local().copy_(distribute_tensor(whole, mesh, tensor.placements).to_local())

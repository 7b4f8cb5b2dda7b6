"""The trap of two syncs: DDP averages the gradients, and the program all-reduces them once more.

The sum over N ranks of a mean that all of them have already is N times the mean: the learning rate is N times too
large, and nothing says so. While a watch is open, `all_reduce`, `reduce` and their coalesced forms look at what they
are given; a gradient that DDP has averaged is refused with the factor. Gradients of a `no_sync()` pass, tensors of
other memory (a flat copy, for one) and groups with no other rank of the DDP in them are let through.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ciuic.errors import DoubleSyncError, TrainingLoopError

_METHODS = ("allreduce", "allreduce_coalesced", "reduce")
_MARK = "_ciuic_synchronised_by"


def mark_managed(model: nn.Module, manager: str) -> None:
    """Note on a module who synchronises its parameters."""
    object.__setattr__(model, _MARK, manager)


def manager_of(model: nn.Module) -> str:
    """Who synchronises the parameters of a module or of the module it wraps; empty: nobody that said so."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return str(getattr(model, _MARK, "") or getattr(inner, _MARK, ""))


def check_not_synchronised(model: nn.Module) -> None:
    """Before something synchronises a model: raises DoubleSyncError when DDP or another part does so already."""
    manager = manager_of(model) or ("DistributedDataParallel" if isinstance(model, DistributedDataParallel) else "")
    if manager:
        raise DoubleSyncError(
            f"this model is already synchronised by {manager}",
            cause="two synchronisations of the same parameters give wrong numbers",
            next="give run.prepare the plain model: it wraps it in DDP where a node has several ranks",
        )


def watch_double_sync(model: nn.Module) -> "DoubleSyncWatch":
    """Refuse manual reductions of gradients that this DDP has averaged, until `close()`.

    Raises TrainingLoopError for a model that is not a DistributedDataParallel.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TrainingLoopError(
            f"{type(model).__name__} is not a DistributedDataParallel",
            cause="only DDP averages gradients by itself",
            next="wrap the model in DDP first; without DDP a manual all_reduce is the only synchronisation",
        )
    return DoubleSyncWatch(model)


class DoubleSyncWatch:
    """One DDP under watch; a context manager."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._ranks = set(dist.get_process_group_ranks(model.process_group))
        self._averaged = False
        self._forward: RemovableHandle | None = model.register_forward_pre_hook(self._before_forward)
        for method in _METHODS:
            _install(method, self)

    def close(self) -> None:
        """Look no longer; torch's functions are as they were when the last watch closes."""
        if self._forward is None:
            return
        self._forward.remove()
        self._forward = None
        for method in _METHODS:
            _remove(method, self)

    def __enter__(self) -> "DoubleSyncWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, group: Any, tensors: Iterable[Tensor], operation: str) -> None:
        """Raises DoubleSyncError when one of the tensors shares memory with a gradient that DDP has averaged."""
        common = self._ranks & set(dist.get_process_group_ranks(group))
        if not self._averaged or len(common) < 2:
            return
        spans = [(_span(tensor), tensor) for tensor in tensors]
        for name, parameter in self._model.module.named_parameters():
            if parameter.grad is None:
                continue
            start, stop = _span(parameter.grad)
            for (low, high), tensor in spans:
                if low < stop and start < high and not self._is_bucket(tensor):
                    raise _error(name, len(common), operation)

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._averaged = bool(self._model.require_backward_grad_sync)

    def _is_bucket(self, tensor: Tensor) -> bool:
        """A whole bucket in the backward pass: that is a communication hook of DDP at work."""
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        in_backward = torch._C._current_graph_task_id() != -1
        return whole and in_backward and bool(self._model.gradient_as_bucket_view)


def _error(name: str, ranks: int, operation: str) -> DoubleSyncError:
    if operation == "AVG":
        effect = "it would change nothing (factor 1), at the price of sending every gradient twice"
    elif operation == "SUM":
        effect = f"it would be {ranks} times too large (factor {ranks}: the sum of {ranks} equal means)"
    else:
        effect = f"{operation.lower()} of {ranks} equal gradients is sent for nothing, or wrong"
    return DoubleSyncError(
        f"the gradient of {name} is synchronised twice",
        cause=f"DDP has averaged it over {ranks} ranks already; with this second reduction {effect}",
        next="remove the manual all_reduce, or run the backward pass under model.no_sync() and keep it",
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last address (exclusive) of a dense tensor's elements."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


# ---- torch's functions while a watch is open. dist.all_reduce and dist.reduce call these methods, however they were
# ---- imported; DDP itself does not.


def _install(method: str, watch: DoubleSyncWatch) -> None:
    current = vars(dist.ProcessGroup)[method]
    watches: list[DoubleSyncWatch] | None = getattr(current, "ciuic_watches", None)
    if watches is None:
        setattr(dist.ProcessGroup, method, _watching(current, [watch]))
    else:
        watches.append(watch)


def _remove(method: str, watch: DoubleSyncWatch) -> None:
    current = vars(dist.ProcessGroup)[method]
    watches: list[DoubleSyncWatch] = current.ciuic_watches
    watches.remove(watch)
    if not watches:
        setattr(dist.ProcessGroup, method, current.ciuic_original)


def _watching(original: Any, watches: list[DoubleSyncWatch]) -> Callable[..., Any]:
    def reduction(group: Any, *arguments: Any, **options: Any) -> Any:
        given = list(_tensors((*arguments[:1], options.get("tensors"), options.get("tensor"))))
        operation = _operation((*arguments[1:], options.get("opts"), options.get("op")))
        for watch in list(watches):
            watch.check(group, given, operation)
        return original.__get__(group, type(group))(*arguments, **options)

    reduction.ciuic_watches = watches  # ty: ignore[missing-attribute]
    reduction.ciuic_original = original  # ty: ignore[missing-attribute]
    return reduction


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    for item in given:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


def _operation(arguments: Iterable[Any]) -> str:
    """Name of the reduction, as far as it is known; torch's default is a sum."""
    kinds = dist.ReduceOp.RedOpType
    for item in arguments:
        found = getattr(item, "reduceOp", item)
        for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
            if found is not None and found == getattr(kinds, name):
                return name
    return "SUM"

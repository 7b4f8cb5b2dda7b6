"""Collectives of the program: the methods of torch's process groups tell the probe. DDP's own reductions do not pass here."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ciuic.doctor.probe.part import Call
from ciuic.doctor.probe.patches import Patches
from ciuic.doctor.probe.probe import Probe, site

METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
"""The method of a process group, and the name that torch.distributed gives it."""
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")


class Calls:
    """Counts the calls of each group."""

    def __init__(self, probe: Probe, patches: Patches) -> None:
        self._probe = probe
        self._numbers: dict[tuple[int, ...], int] = {}
        for method, name in METHODS.items():
            patches.around(dist.ProcessGroup, method, self._make(name))

    def _make(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        probe = self._probe

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def collective(group: Any, *arguments: Any, **keywords: Any) -> Any:
                if getattr(probe._inside, "now", False):
                    return original(group, *arguments, **keywords)
                call = self._call(name, group, arguments, keywords)
                before = probe.enter("collective")
                probe.emit("collective_begin", call)
                work = original(group, *arguments, **keywords)
                probe.emit("collective_end", call)
                if work is None:
                    probe.enter(before)
                return work

            return collective

        return make

    def _call(self, name: str, group: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
        ranks = tuple(dist.get_process_group_ranks(group))
        number = self._numbers[ranks] = self._numbers.get(ranks, 0) + 1
        values = (*arguments, *keywords.values())
        tensors = tuple(_tensors(values))
        return Call(
            name=name, number=number, ranks=ranks, site=site(), tensors=tensors, operation=_operation(values)
        )


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    for item in given:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


def _operation(values: Iterable[Any]) -> str:
    kinds = dist.ReduceOp.RedOpType
    for value in values:
        found = getattr(value, "reduceOp", value)
        for name in OPERATIONS:
            if isinstance(found, dist.ReduceOp | kinds) and found == getattr(kinds, name):
                return name
    return ""

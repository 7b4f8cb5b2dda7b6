"""Collectives of the program: the methods of torch's process groups tell the probe. DDP's own do not pass here."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ciuic.doctor.probe.part import Call
from ciuic.doctor.probe.patches import Patches
from ciuic.doctor.probe.probe import Probe
from ciuic.doctor.probe.stack import site
from ciuic.doctor.record import PROBE_FAILED

METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
"""The method of a process group, old and new, and the name that torch.distributed gives it."""
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
WORKS_HELD = 256
"""Calls whose Work may still be waited for."""


class _Group:
    """What is known about a process group."""

    def __init__(self, name: str, ranks: tuple[int, ...], backend: str) -> None:
        self.name, self.ranks, self.backend, self.number = name, ranks, backend, 0


class Calls:
    """Counts the calls of each group."""

    def __init__(self, probe: Probe, patches: Patches) -> None:
        self._probe = probe
        self._groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()
        self._made: dict[str, int] = {}
        self._has_failed = False
        self._works: dict[int, Call] = {}
        for method, name in METHODS.items():
            patches.around(dist.ProcessGroup, method, self._make(name))
        patches.around(dist.Work, "wait", self._waits)

    def _make(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        probe = self._probe

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def collective(group: Any, *arguments: Any, **keywords: Any) -> Any:
                if getattr(probe._inside, "now", False):
                    return original(group, *arguments, **keywords)
                began_ns = time.thread_time_ns()
                call = self._described(name, group, arguments, keywords)
                probe.account(began_ns)
                if call is None:
                    return original(group, *arguments, **keywords)
                before = probe.enter("collective")
                probe.emit("collective_begin", call)
                work = original(group, *arguments, **keywords)
                probe.emit("collective_end", call)
                probe.enter(before)
                if work is not None:
                    self._remember(work, call)
                return work

            return collective

        return make

    def _waits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        probe = self._probe

        def wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
            if getattr(probe._inside, "now", False):
                return original(work, *arguments, **keywords)
            before = probe.enter("collective")
            probe.emit("collective_wait", self._works.pop(id(work), None))
            result = original(work, *arguments, **keywords)
            probe.enter(before)  # not after an error: then it left from here
            return result

        return wait

    def _remember(self, work: Any, call: Call) -> None:
        self._works[id(work)] = Call(
            name=call.name,
            number=call.number,
            ranks=call.ranks,
            site=call.site,
            operation=call.operation,
            group=call.group,
        )
        if len(self._works) > WORKS_HELD:
            del self._works[next(iter(self._works))]

    def _group(self, group: Any) -> _Group:
        known = self._groups.get(group)
        if known is None:
            name = str(group.group_name)
            times = self._made[name] = self._made.get(name, 0) + 1  # of one name again: after destroy_process_group
            ranks = tuple(dist.get_process_group_ranks(group))
            known = _Group(name if times == 1 else f"{name}#{times}", ranks, str(dist.get_backend(group)))
            self._groups[group] = known
        return known

    def _described(self, name: str, group: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call | None:
        """None: one that cannot be described, as of a group that torch does not know; it is made all the same."""
        try:
            return self._call(name, group, arguments, keywords)
        except Exception as error:  # noqa: BLE001 - groups are made in many ways, some by hand
            if not self._has_failed:
                self._has_failed = True
                self._probe.note(PROBE_FAILED, part="Calls", event=name, error=f"{type(error).__name__}: {error}"[:300])
            return None

    def _call(self, name: str, group: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
        known = self._group(group)
        known.number += 1
        values = (*arguments, *keywords.values())
        return Call(
            name=name,
            number=known.number,
            ranks=known.ranks,
            site=site(),
            tensors=tuple(_tensors(values)),
            operation=_operation(values),
            group=known.name,
            backend=known.backend,
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

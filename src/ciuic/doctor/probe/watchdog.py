"""What a rank does and waits for: into each beat, and the last calls as an answer. No tensor is touched."""

import importlib
import json
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ciuic.doctor.blackbox import BlackBox
from ciuic.doctor.facts_waiting import (
    CALLS,
    CPU,
    DDP_BUFFERS,
    DDP_GRADIENTS,
    HISTORY,
    LATE,
    NEW_CALL,
    OPEN,
    PENDING,
    SAVES,
    STILL,
    UNEVEN,
    WAITS,
)
from ciuic.doctor.probe import stack
from ciuic.doctor.probe.part import Call, Model, Part
from ciuic.doctor.probe.sequence import POINT_TO_POINT, Made, Sequence, detail_of
from ciuic.doctor.record import Facts, Question

GROUPS_MAX = 8
STILL_S = 0.4
"""From then on the stack is told."""
NEW_MAX = 128
"""Kinds of calls that are announced."""
FLUSH_S = 0.005
"""How long the announcement of a new kind of call may hold the call up."""
HISTORY_CALLS = 256
RECORDER_CALLS = 256
LAST_CALLS = 64
"""Of each group, with the last words."""
CPU_IDLE = 0.3
WITHOUT_GRADIENTS = "without gradients"


RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""torch's two Flight Recorders: of gloo, and of NCCL, which does not write into the other one."""


def _recorders() -> list[Callable[[bool, bool], bytes]]:
    """Those that this torch has: private functions."""
    try:
        module = importlib.import_module("torch._C._distributed_c10d")
    except ImportError:
        return []
    return [getattr(module, name) for name in RECORDERS if hasattr(module, name)]


class Watchdog(Part):
    """Order of calls, stack, processor time."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._sequences: dict[str, Sequence] = {}
        self._known: set[tuple[str, str, str, str]] = set()
        self._open: Made | None = None
        self._box = BlackBox()
        self._to_reduce: dict[int, Model] = {}
        self._uneven = False
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}
        """Of the groups of wrappers: torch needs long to tell them."""
        self._processor = stack.Processor()
        self._late = dist.is_available() and dist.is_initialized()
        self._recorders = _recorders()

    # ---- the order of calls ----------------------------------------------------------------------------------------

    def collective_begin(self, call: Call) -> None:
        self._open = self._made(call.name, call.group, call.ranks, detail_of(call), call.site)

    def collective_wait(self, call: Call | None) -> None:
        now = self._open
        if call is not None and (now is None or now.site != call.site):
            self._open = Made(
                group=call.group,
                number=call.number,
                name=call.name,
                detail="",
                site=call.site,
                step=self.probe.step,
                ranks=call.ranks,
            )

    def wrapper_begin(self, model: Model) -> None:
        wrapper: Any = model.wrapper
        group = self._group(wrapper) if wrapper is not None else ""
        if not group:
            return
        if torch.is_grad_enabled() and getattr(wrapper, "require_backward_grad_sync", True):
            self._to_reduce[model.index] = model
        if getattr(wrapper, "_check_sync_bufs_pre_fwd", bool)():
            detail = "" if torch.is_grad_enabled() else WITHOUT_GRADIENTS
            self._open = self._made(DDP_BUFFERS, group, model.ranks, detail, stack.site())
            self.probe.enter("collective")

    def backward_begin(self, roots: tuple[Any, ...]) -> None:
        self._open = None
        for model in self._to_reduce.values():
            group = self._group(model.wrapper)
            if group:
                self._open = self._made(DDP_GRADIENTS, group, model.ranks, "", stack.site())
        self._to_reduce.clear()

    def _group(self, wrapper: Any) -> str:
        """The name of a DDP's group; empty when DDP's own calls must not be counted: ranks may differ in them."""
        self._uneven = self._uneven or getattr(getattr(wrapper, "_join_config", None), "enable", False)
        if self._uneven:
            return ""
        known = self._names.get(id(wrapper))
        if known is None or known[0]() is not wrapper:
            group = getattr(wrapper, "process_group", None)
            known = self._names[id(wrapper)] = weakref.ref(wrapper), "" if group is None else str(group.group_name)
        return known[1]

    def _made(self, name: str, group: str, ranks: tuple[int, ...], detail: str, where: str) -> Made:
        made = Made(group=group, number=0, name=name, detail=detail, site=where, step=self.probe.step, ranks=ranks)
        if name not in POINT_TO_POINT:
            sequence = self._sequences.get(group)
            if sequence is None:
                sequence = self._sequences[group] = Sequence(ranks=ranks)
            sequence.add(made)
            self._box.add([group, made.number, name, detail, where, made.step])
        key = group, name, detail, where
        if key not in self._known and len(self._known) < NEW_MAX:
            self._known.add(key)
            self.probe.note(NEW_CALL, **self._facts(made), **self._doubts())
            self.probe.courier.flush(FLUSH_S)
        return made

    def _doubts(self) -> Facts:
        return ({LATE: True} if self._late else {}) | ({UNEVEN: True} if self._uneven else {})

    def _facts(self, made: Made) -> Facts:
        everybody = len(made.ranks) == self.probe.world
        return {
            "group": made.group,
            "number": made.number,
            "name": made.name,
            "detail": made.detail,
            "site": made.site,
            "step": made.step,
            "ranks": [] if everybody else list(made.ranks[:64]),
        }

    # ---- beats and answers: from the probe's own thread --------------------------------------------------------------

    def tick(self) -> Facts:
        probe = self.probe
        sequences = list(self._sequences.items())[-GROUPS_MAX:]
        facts: Facts = {CALLS: {name: sequence.marks() for name, sequence in sequences}}
        share = self._processor.share(probe.thread)
        if share is not None:
            facts[CPU] = round(share, 3)
        facts.update(self._doubts())
        opened, phase = self._open, probe.phase
        if opened is not None and phase in ("collective", "backward"):
            facts[OPEN] = self._facts(opened)
        if time.monotonic() - probe.phase_since_s > STILL_S:
            facts.update(self._still(phase, share))
        return facts

    def ends(self) -> Facts:
        """The last calls too: a rank that has ended cannot be asked."""
        self._box.close()
        sequences = list(self._sequences.items())[-GROUPS_MAX:]
        facts: Facts = {CALLS: {name: sequence.marks() for name, sequence in sequences}, **self._doubts()}
        facts[HISTORY] = {name: self._history(name, LAST_CALLS) for name, _ in sequences}
        if self._open is not None:
            facts[OPEN] = self._facts(self._open)
        return facts

    def _still(self, phase: str, share: float | None) -> Facts:
        frames = stack.frames_of(self.probe.thread)
        pending = self._pending()
        return {
            STILL: stack.described(frames),
            SAVES: phase == "save" or (phase in ("other", "start") and stack.is_saving(frames)),
            WAITS: self._waits(phase, frames, share, pending),
            PENDING: pending,
        }

    def _waits(self, phase: str, frames: list[FrameType], share: float | None, pending: Facts) -> bool:
        if phase == "collective":
            return True
        idle = share is None or share < CPU_IDLE
        if phase == "backward":
            return (idle and stack.in_torch(frames)) or bool(pending)
        if torch.cuda.is_initialized():  # the host waits for the device, which waits
            return bool(pending)
        return bool(pending) and idle and stack.in_torch(frames)

    def _pending(self) -> Facts:
        found = {}
        for dump in self._dumps(calls=False):
            for name, each in list(dump.get("pg_status", {}).items())[:GROUPS_MAX]:
                started, done = int(each["last_enqueued_collective"]), int(each["last_completed_collective"])
                if started > done:
                    found[name] = [started, done]
        return found

    def _dumps(self, *, calls: bool) -> list[dict[str, Any]]:
        return [json.loads(recorder(calls, False)) for recorder in self._recorders]

    def answer(self, question: Question) -> Facts | None:
        if question.kind != HISTORY:
            return None
        return self._history(question.facts["group"], HISTORY_CALLS)

    def _history(self, group: str, most: int) -> Facts:
        sequence = self._sequences.get(group)
        last = list(sequence.last)[-most:] if sequence is not None else []
        calls = [[made.number, made.name, made.detail, made.site, made.step] for made in last]
        return {"calls": calls, "recorder": self._recorded(group)}

    def _recorded(self, group: str) -> list[list[Any]]:
        entries = [entry for dump in self._dumps(calls=True) for entry in dump.get("entries", [])]
        name = group.partition("#")[0]
        own = [entry for entry in entries if entry["process_group"][0] == name and not entry.get("is_p2p")]
        return [
            [entry["collective_seq_id"], entry["profiling_name"].partition(":")[2], str(entry["input_sizes"])[:100]]
            for entry in own[-RECORDER_CALLS:]
        ]

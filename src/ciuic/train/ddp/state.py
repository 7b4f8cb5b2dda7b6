"""What the hook must remember, as plain tensors and JSON: for a resume, and for another number of ranks.

One state per rank:

    {"format": 1, "rank": r, "world_size": N, "steps": n, "codec": ..., "form": ...,
     "parameters": [[name, element count, row length, is coded], ...],
     "worker": {name: fp32 [element count]}, "owner": {name: [start, fp32 [part]]}}
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ciuic.errors import LayoutMismatchError, StorageError
from ciuic.train.ddp.plan import Parameter, cut
from ciuic.train.ddp.reduce import BucketReducer, is_finite

FORMAT = 1
State = dict[str, Any]


def read_state(reducer: BucketReducer, steps: int) -> State:
    """Copies of everything; on the host."""
    kept, names = reducer.residuals, [parameter.name for parameter in reducer.parameters]
    return {
        "format": FORMAT,
        "rank": reducer.wire.rank,
        "world_size": reducer.wire.size,
        "steps": steps,
        "codec": reducer.codec,
        "form": reducer.form,
        "parameters": _describe(reducer.parameters),
        "worker": {name: _copy(values) for name, values in zip(names, kept.worker, strict=True)},
        "owner": {
            name: [start, _copy(values)] for name, (start, _), values in zip(names, kept.owned, kept.owner, strict=True)
        },
    }


def write_state(reducer: BucketReducer, state: State) -> int:
    """Put a state back; returns its steps. Raises LayoutMismatchError or StorageError; then nothing has changed."""
    check_state(state)
    if state["parameters"] != _describe(reducer.parameters):
        ours, theirs = _describe(reducer.parameters), state["parameters"]
        different = next((a[0] for a, b in zip(ours, theirs, strict=False) if a != b), "the number of parameters")
        raise LayoutMismatchError(
            f"the saved residuals are of another model: {different}", next="load the state of the same model"
        )
    place = (state["rank"], state["world_size"])
    if place != (reducer.wire.rank, reducer.wire.size):
        raise LayoutMismatchError(
            f"the saved residuals are of rank {place[0]} of {place[1]}, "
            f"this is rank {reducer.wire.rank} of {reducer.wire.size}",
            cause="each rank has residuals of its own",
            next="collect the states of all ranks and give them to ciuic.torch.merge_ddp_states(states, world_size)",
        )
    kept = reducer.residuals
    for number, parameter in enumerate(reducer.parameters):
        kept.worker[number].copy_(state["worker"][parameter.name])
        kept.owner[number].copy_(state["owner"][parameter.name][1])
    kept.discard()
    kept.owner_is_zero = not any(bool(values.any()) for values in kept.owner)
    return int(state["steps"])


def merge_ddp_states(states: Sequence[State], world_size: int) -> list[State]:
    """The states of all N ranks of a job, made into states of `world_size` = M ranks.

    states: one per rank; the first M of them stay, in this order, when M < N. What was still to be added to the mean
    stays the same: sum e_w' / M = sum e_w / N, and the owner residuals are cut anew without a change.
    A leaving rank's worker residual goes to one that stays; a joining rank starts with zeros.
    Raises StorageError when a state is missing, LayoutMismatchError when they are of different models or steps.
    """
    for state in states:
        check_state(state)
    _check_complete(states, world_size)
    if len(states) == world_size and [state["rank"] for state in states] == list(range(world_size)):
        return list(states)
    parameters = [
        Parameter(name=n, element_count=c, row_length=r, is_coded=i) for n, c, r, i in states[0]["parameters"]
    ]
    parts = cut(parameters, world_size)
    merged: list[State] = [
        {**states[0], "rank": rank, "world_size": world_size, "worker": {}, "owner": {}} for rank in range(world_size)
    ]
    for parameter, ranges in zip(parameters, parts, strict=True):
        whole = torch.zeros(parameter.element_count)
        for state in states:
            start, values = state["owner"][parameter.name]
            whole[start : start + len(values)] = values
        for rank, (start, stop) in enumerate(ranges):
            merged[rank]["owner"][parameter.name] = [start, whole[start:stop].clone()]
            merged[rank]["worker"][parameter.name] = _share(states, parameter, rank, world_size)
    return merged


def check_state(state: State) -> None:
    """Raises StorageError when this is no state of the hook, or one that holds infinities or NaN."""
    try:
        kinds: list[tuple[str, int, int, bool]] = msgspec.convert(state["parameters"], list[tuple[str, int, int, bool]])
        good = state["format"] == FORMAT and 0 <= state["rank"] < state["world_size"] and state["steps"] >= 0
        for name, count, row, _ in kinds:
            start, part = state["owner"][name]
            worker = state["worker"][name]
            good = good and count > 0 and row > 0 and count % row == 0
            good = good and worker.shape == (count,) and 0 <= start <= start + len(part) <= count
            good = good and is_finite(worker.float()) and is_finite(part.float())
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise StorageError("this is no state of compress_ddp", cause=f"{type(error).__name__}: {error}") from error
    if not good:
        raise StorageError(
            "this state of compress_ddp is damaged",
            cause="a size, a place or a number in it cannot be",
            next="load an older checkpoint",
        )


def _check_complete(states: Sequence[State], world_size: int) -> None:
    if not states or world_size < 1 or sorted(s["rank"] for s in states) != list(range(states[0]["world_size"])):
        raise StorageError(
            "not all ranks' states are here",
            cause=f"ranks {sorted(s['rank'] for s in states)} were given",
            next="collect handle.state_dict() of every rank of the old job",
        )
    for state in states[1:]:
        for key in ("parameters", "steps", "world_size"):
            if state[key] != states[0][key]:
                raise LayoutMismatchError(f"the ranks' states differ in {key}", next="take states of the same step")


def _share(states: Sequence[State], parameter: Parameter, rank: int, world_size: int) -> Tensor:
    """(M / N) (own + what leaving ranks hand over)."""
    if rank >= len(states):
        return torch.zeros(parameter.element_count)
    total = states[rank]["worker"][parameter.name].clone()
    for leaving in range(world_size, len(states)):
        if leaving % world_size == rank:
            total += states[leaving]["worker"][parameter.name]
    return total.mul_(world_size / len(states))


def _describe(parameters: Sequence[Parameter]) -> list[list[object]]:
    return [[p.name, p.element_count, p.row_length, p.is_coded] for p in parameters]


def _copy(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)

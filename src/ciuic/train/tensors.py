"""Which tensors of a model the ledger holds, and in which fragment each of them is."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ciuic.errors import ModelError
from ciuic.job import FragmentBy
from ciuic.ledger.layout import MAX_COUNTERS, MAX_FRAGMENTS, Layout, make_layout, section_of
from ciuic.ledger.layout import Tensor as Spec
from ciuic.train.experts import split_experts

ROUTER = re.compile(r"(^|\.)(router|gate)\.weight$")
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


def model_layout(model: nn.Module, fragments: int = 1, by: FragmentBy = "block") -> tuple[Layout, dict[str, Tensor]]:
    """The layout of a model and the model's tensors by name; `by`: what stays together in a fragment.

    Trainable parameters, persistent floating-point buffers (BatchNorm statistics, expert biases) and integer
    buffers (counters). Frozen parameters are not sent: every node loads them itself. Tied parameters count once.
    Raises ModelError when there is nothing to train, no values yet, or too little for so many fragments.
    """
    found = list(_tensors(model))
    if not any(spec.trainable for spec, _ in found):
        raise ModelError("the model has no trainable parameter", next="unfreeze what should be trained")
    for spec, tensor in found:
        if tensor.is_meta:
            raise ModelError(
                f"{spec.name} has no values",
                cause="it is on the meta device",
                next='give the model memory and weights first: model.to_empty(device="cpu"), then load or draw them',
            )
    specs = [spec for spec, _ in found]
    specs = assign_fragments(specs, fragments) if by == "block" else assign_experts(specs, fragments)
    return make_layout(specs, fragments), {spec.name: tensor for spec, tensor in found}


def assign_fragments(specs: Sequence[Spec], fragments: int) -> list[Spec]:
    """The tensors (in the model's order), each with its fragment.

    A block (what has the same name up to its first number, `layers.3`) stays together unless it is larger than a
    fragment should be; then its parts are placed. The largest goes first, each to the fragment that is the smallest
    so far: blocks of equal size lie strided by depth, embedding and head are where they balance. With whole blocks
    no fragment is larger than the smallest by more than one of them. Depends on names and shapes only.
    """
    sized = [spec for spec in specs if spec.section != "counter"]
    if not 1 <= fragments <= min(MAX_FRAGMENTS, len(sized)):
        raise ModelError(
            f"this model cannot be cut into {fragments} fragments",
            cause=f"it has {len(sized)} tensors, and there are at most {MAX_FRAGMENTS} fragments",
            next="use fewer fragments",
        )
    sizes, place = [0] * fragments, dict.fromkeys((spec.name for spec in specs), 0)
    for group in sorted(_groups(sized, fragments), key=_elements, reverse=True):  # stable: equal ones by depth
        smallest = sizes.index(min(sizes))
        sizes[smallest] += _elements(group)
        place.update(dict.fromkeys((spec.name for spec in group), smallest))
    return [msgspec.structs.replace(spec, fragment=place[spec.name]) for spec in specs]


def assign_experts(specs: Sequence[Spec], fragments: int) -> list[Spec]:
    """As assign_fragments, but experts have fragments of their own, after those of the rest: see train.experts."""
    split = split_experts(specs, fragments)
    rest = assign_fragments(split.rest, split.rest_fragments) if split.rest_fragments else split.rest
    return [*rest, *split.experts]


def _groups(specs: list[Spec], fragments: int) -> list[list[Spec]]:
    """Blocks; level by level cut into parts where one is larger than a fragment, or all when there are too few."""
    largest = _elements(specs) / fragments
    groups, depth = _cut(specs, 0), 0
    while len(groups) < fragments or any(len(group) > 1 and _elements(group) > largest for group in groups):
        depth += 1
        few = len(groups) < fragments
        groups = [
            part for group in groups for part in (_cut(group, depth) if few or _elements(group) > largest else [group])
        ]
    return groups


def _cut(specs: list[Spec], depth: int) -> list[list[Spec]]:
    """The tensors by the first levels of their names: a block's, and `depth` more."""
    parts: dict[tuple[str, ...], list[Spec]] = {}
    for spec in specs:
        levels = spec.name.split(".")
        number = next((at for at, level in enumerate(levels) if level.isdigit()), len(levels) - 2)
        parts.setdefault(tuple(levels[: max(1, number + 1) + depth]), []).append(spec)
    return list(parts.values())


def _elements(specs: list[Spec]) -> int:
    return sum(spec.element_count for spec in specs)


def _tensors(model: nn.Module) -> Iterator[tuple[Spec, Tensor]]:
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            section = section_of(parameter.shape, is_router=ROUTER.search(name) is not None)
            rows = id(parameter) in embeddings or (parameter.dim() >= 3 and EXPERTS.search(name) is not None)
            yield _spec(name, parameter, section, rows), parameter
    persistent = model.state_dict(keep_vars=True).keys()
    integers = 0
    for name, buffer in model.named_buffers():
        if name not in persistent or buffer.numel() == 0 or buffer.dtype == torch.bool or buffer.is_complex():
            continue
        if buffer.is_floating_point():
            yield _spec(name, buffer, "buffer"), buffer
        elif (integers := integers + buffer.numel()) <= MAX_COUNTERS:
            yield _spec(name, buffer, "counter"), buffer


def _spec(name: str, tensor: Tensor, section: Any, row_aligned: bool = False) -> Spec:
    return Spec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        section=section,
        trainable=section in ("coded", "small"),
        row_aligned=row_aligned,
    )

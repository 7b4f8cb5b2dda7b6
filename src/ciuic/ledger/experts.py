"""Which experts of a mixture a layout has, by the names of its tensors; no torch.

An expert is known by its layer (the name of the module that holds `experts`) and its index there. Its parameters are
modules of their own (`layers.1.mlp.experts.3.up_proj.weight`) or rows of stacked ones (`layers.1.mlp.experts.up_proj`).
"""

import re
from collections.abc import Iterable

from ciuic.ledger.layout import Layout, Slice

_NAME = re.compile(r"^(?:(?P<layer>.*)\.)?experts\.(?:(?P<index>\d{1,9})\..+|\D.*)$")
Expert = tuple[str, int]
"""(layer, index)."""


def parse_expert(name: str) -> tuple[str, int | None] | None:
    """Layer and index of the expert that a parameter belongs to; the index is None for stacked ones, or no experts."""
    found = _NAME.match(name)
    if found is None:
        return None
    index = found["index"]
    return found["layer"] or "", None if index is None else int(index)


def experts_by_fragment(layout: Layout) -> list[frozenset[Expert]]:
    """The experts with tensors in each fragment. Stacked ones count where the layout has them in slices."""
    found: list[set[Expert]] = [set() for _ in range(layout.fragment_count)]
    for tensor in layout.tensors:
        name = parse_expert(tensor.source) if tensor.trainable else None
        if name is None:
            continue
        layer, index = name
        if index is not None:
            found[tensor.fragment].add((layer, index))
        elif isinstance(tensor.part, Slice):
            found[tensor.fragment].update((layer, row) for row in range(tensor.part.start, tensor.part.stop))
    return [frozenset(experts) for experts in found]


def describe_experts(experts: Iterable[Expert]) -> str:
    """Their indices, like `experts 0-3, 7`; empty for none."""
    runs: list[list[int]] = []
    for index in sorted({index for _, index in experts}):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    if not runs:
        return ""
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    listed = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"expert {listed}" if one else f"experts {listed}"

"""Fragments of a mixture of experts by expert: those that few tokens reach can then be exchanged less often.

The unit is one expert of one layer. Units are laid out by index, and within an index by layer, and cut into runs of
about equal size: a fragment holds the same experts of all layers as far as sizes allow, so any number of fragments
works, whatever the number of layers is, and no fragment is a whole layer (whose experts together always get every
token, so that their traffic could never differ). Stacked parameters are cut into slices of rows.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from msgspec.structs import replace

from ciuic.errors import ModelError
from ciuic.ledger.experts import parse_expert
from ciuic.ledger.layout import MAX_FRAGMENTS, Slice, Tensor, section_of

Unit = tuple[int, int]
"""(index, number of the layer): one expert of one layer, in the order of fragments."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The tensors of a model: its experts placed, the rest not yet."""

    rest: list[Tensor]
    """To be spread over fragments 0 .. rest_fragments - 1."""
    rest_fragments: int
    experts: list[Tensor]
    """In the fragments after those; slices where the model stacks experts."""


def split_experts(specs: Sequence[Tensor], fragments: int) -> Split:
    """Cut the experts of a model into fragments, by names and shapes only. `specs`: in the model's order.

    Of all ways to give some fragments to the experts and some to the rest, the one whose largest fragment is the
    smallest. Raises ModelError when there is no expert, or not enough to cut.
    """
    owners = _owners(specs)
    if not owners:
        raise ModelError(
            'sync.fragment_by = "expert" needs a mixture of experts',
            cause="no trained parameter of this model lies below a module named experts",
            next='use sync.fragment_by = "block"',
        )
    rest = [spec for spec in specs if spec.name not in owners]
    sizes = _sizes(specs, owners)
    sized = [spec for spec in rest if spec.section != "counter"]
    count = _rest_fragments(sized, sizes, fragments)
    units = sorted(sizes)
    groups = runs([sizes[unit] for unit in units], fragments - count)
    place = {unit: count + group for unit, group in zip(units, groups, strict=True)}
    experts = [part for spec in specs if spec.name in owners for part in _placed(spec, owners[spec.name], place)]
    return Split(rest=rest, rest_fragments=count, experts=experts)


def _owners(specs: Sequence[Tensor]) -> dict[str, tuple[int, int | None]]:
    """Layer number and index (None: stacked) of each tensor that belongs to experts, by name."""
    named = {spec.name: found for spec in specs if spec.trainable and (found := parse_expert(spec.name))}
    stacks = {
        named[spec.name][0]: spec.shape[0]
        for spec in specs
        if spec.name in named and named[spec.name][1] is None and len(spec.shape) >= 3
    }
    numbers: dict[str, int] = {}
    owners: dict[str, tuple[int, int | None]] = {}
    for spec in specs:
        if spec.name not in named:
            continue
        layer, index = named[spec.name]
        if index is None and (len(spec.shape) < 2 or spec.shape[0] != stacks.get(layer)):
            continue  # not one row per expert: shared by all of them
        owners[spec.name] = (numbers.setdefault(layer, len(numbers)), index)
    return owners


def _sizes(specs: Sequence[Tensor], owners: Mapping[str, tuple[int, int | None]]) -> Counter[Unit]:
    """Elements of each expert of each layer."""
    sizes: Counter[Unit] = Counter()
    for spec in specs:
        if spec.name in owners:
            layer, index = owners[spec.name]
            rows = range(spec.shape[0]) if index is None else (index,)
            for row in rows:
                sizes[row, layer] += spec.element_count // len(rows)
    return sizes


def _rest_fragments(rest: Sequence[Tensor], sizes: Counter[Unit], fragments: int) -> int:
    """How many fragments hold what is no expert; 0 only when there is nothing else."""
    plain, experts = sum(spec.element_count for spec in rest), sizes.total()
    possible = range(min(1, len(rest)), min(len(rest), fragments - 1) + 1)
    good = [n for n in possible if fragments - n <= min(len(sizes), MAX_FRAGMENTS)]
    if not good or fragments > MAX_FRAGMENTS:
        raise ModelError(
            f"this model cannot be cut into {fragments} fragments by expert",
            cause=f"it has {len(sizes)} experts over all layers and {len(rest)} other tensors, and there are at most "
            f"{MAX_FRAGMENTS} fragments, one of them for what is no expert",
            next="use at least 2 fragments, and not more than there are experts",
        )
    return min(good, key=lambda n: (max(plain / n if n else 0.0, experts / (fragments - n)), n))


def runs(sizes: Sequence[int], count: int) -> list[int]:
    """The group of each of these in a row: `count` groups, none empty, each border where it is nearest to its share."""
    sums = list(accumulate(sizes, initial=0))
    borders = [0]
    for group in range(1, count):
        wanted = sums[-1] * group
        at = bisect_left(sums, wanted, key=lambda before: before * count)
        if at and wanted - sums[at - 1] * count <= sums[at] * count - wanted:
            at -= 1
        borders.append(min(max(at, borders[-1] + 1), len(sizes) - (count - group)))
    return [bisect_left(borders, number + 1) - 1 for number in range(len(sizes))]


def _placed(spec: Tensor, owner: tuple[int, int | None], place: Mapping[Unit, int]) -> list[Tensor]:
    """The tensor in its expert's fragment, or its slices, each in the fragment of its experts."""
    layer, index = owner
    if index is not None:
        return [replace(spec, fragment=place[index, layer])]
    parts = []
    for fragment, found in groupby(range(spec.shape[0]), key=lambda row: place[row, layer]):
        rows = list(found)
        part = Slice(of=spec.name, start=rows[0], stop=rows[-1] + 1, rows=spec.shape[0])
        shape = (len(rows), *spec.shape[1:])
        parts.append(
            replace(spec, name=part.name, part=part, shape=shape, section=section_of(shape), fragment=fragment)
        )
    return parts

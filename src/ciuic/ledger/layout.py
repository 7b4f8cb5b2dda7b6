"""The layout: which parameter lies where in the flat fp32 address space. Shared by hub and nodes; no torch.

Within a fragment the order is coded tensors, small tensors, buffers, each by name, so each section is contiguous.
Integer buffers (counters) are not in the address space: they travel as integers and take the maximum.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ciuic.codec import FragmentShape
from ciuic.errors import LayoutMismatchError, ProtocolError

SMALL_ELEMENTS = 4096
"""Tensors below this travel in full precision (bf16): their scales would cost more than they save."""
MAX_TENSORS = 1_000_000
MAX_ELEMENTS = 1 << 42
MAX_COUNTERS = 65_536
MAX_FRAGMENTS = 256
MAX_SCALE = 1e6
LEAST_EPS = 1e-12
LEAST_FREEZE = 0.2
"""Freezing the second moment earlier than at this progress breaks training (measured: 2.64 and 2.30 against 2.14)."""
_SECTION_ORDER = {"coded": 0, "small": 1, "buffer": 2, "counter": 3}

Section = Literal["coded", "small", "buffer", "counter"]


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows [start, stop) of a parameter, along its first dimension, that has `rows` of them."""

    of: str
    """The parameter's name in the model."""
    start: int
    stop: int
    rows: int

    @property
    def name(self) -> str:
        """What the slice is called in a layout."""
        return f"{self.of}[{self.start}:{self.stop}]"


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One parameter or buffer, or a slice of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    section: Section
    trainable: bool = True
    row_aligned: bool = False
    """Scale blocks do not cross rows (embeddings, expert matrices)."""
    fragment: int = 0
    lr_scale: float = 1.0
    """Times the run's learning rate, in `gradient` mode."""
    weight_decay: float = 0.0
    """Decoupled, in `gradient` mode."""
    part: Slice | UnsetType = UNSET
    """Set: only these rows of a parameter. Left out of the digest where it is not set."""

    @property
    def source(self) -> str:
        """The name in the model of what this is, or is a slice of."""
        return self.part.of if isinstance(self.part, Slice) else self.name

    @property
    def element_count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class StepRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How `gradient` mode moves the base by a decoded mean; the same on hub and nodes. See ledger.stepping."""

    beta1: float
    beta2: float
    eps: float
    feedback: bool = False
    """What a codec dropped is added to the next push and entry."""
    freeze_at: float = 1.0
    """Progress of the run at which the second moment is frozen and 1-bit momentum is sent; 1: never."""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All tensors in storage order. Build with `make_layout`, read from outside with `layout_from_dict`."""

    tensors: tuple[Tensor, ...]
    fragment_count: int = 1
    step: StepRule | None = None
    """Set in `gradient` mode; else entries are subtracted from the base."""

    @property
    def digest(self) -> str:
        """Hex digest (128 bit) over every field of every tensor."""
        body = msgspec.json.encode(self, order="deterministic")
        return hashlib.blake2b(body, digest_size=16).hexdigest()

    @property
    def parameter_count(self) -> int:
        """Elements of trainable parameters."""
        return sum(t.element_count for t in self.tensors if t.trainable)

    def of_fragment(self, fragment: int) -> list[Tensor]:
        """The tensors of the flat vector of a fragment, in order (no counters)."""
        return [t for t in self.tensors if t.fragment == fragment and t.section != "counter"]

    def counters(self) -> list[Tensor]:
        """Integer buffers, in order."""
        return [t for t in self.tensors if t.section == "counter"]

    def fragment_shape(self, fragment: int) -> FragmentShape:
        """What the codecs need to know of a fragment."""
        tensors = self.of_fragment(fragment)
        return FragmentShape(
            rows=tuple(_rows(t) for t in tensors if t.section == "coded"),
            small_count=sum(t.element_count for t in tensors if t.section == "small"),
            buffer_count=sum(t.element_count for t in tensors if t.section == "buffer"),
        )

    def name_at(self, fragment: int, index: int) -> str:
        """The tensor that element `index` of a fragment belongs to, with the place inside it."""
        for tensor in self.of_fragment(fragment):
            if index < tensor.element_count:
                return f"{tensor.name}[{index}]"
            index -= tensor.element_count
        return "past the end"


def _rows(tensor: Tensor) -> tuple[int, int]:
    if not tensor.row_aligned or len(tensor.shape) < 2:
        return 1, tensor.element_count
    return tensor.element_count // tensor.shape[-1], tensor.shape[-1]


def section_of(shape: Sequence[int], *, is_router: bool = False) -> Literal["coded", "small"]:
    """The section of a trainable parameter."""
    count = 1
    for size in shape:
        count *= size
    return "small" if len(shape) < 2 or is_router or count < SMALL_ELEMENTS else "coded"


def make_layout(tensors: Sequence[Tensor], fragment_count: int = 1, step: StepRule | None = None) -> Layout:
    """Put tensors into storage order and check them. Raises ProtocolError naming the tensor."""
    if not 1 <= fragment_count <= MAX_FRAGMENTS:
        raise ProtocolError(f"a layout of {fragment_count} fragments cannot be", next="use at least one fragment")
    if len(tensors) > MAX_TENSORS:
        raise ProtocolError(f"a layout of {len(tensors)} tensors is over the limit of {MAX_TENSORS}")
    ordered = sorted(tensors, key=lambda t: (t.fragment, _SECTION_ORDER[t.section], t.name))
    total = counters = 0
    names: set[str] = set()
    for tensor in ordered:
        _check(tensor, fragment_count, names)
        names.add(tensor.name)
        if tensor.section == "counter":
            counters += tensor.element_count
        else:
            total += tensor.element_count
    if total > MAX_ELEMENTS or counters > MAX_COUNTERS:
        raise ProtocolError(f"a layout of {total} elements and {counters} counters is over the limit")
    _check_parts(ordered)
    _check_step(step)
    layout = Layout(tensors=tuple(ordered), fragment_count=fragment_count, step=step)
    present = {t.fragment for t in ordered if t.section != "counter"}
    if present != set(range(fragment_count)):
        raise ProtocolError("a layout has an empty fragment", cause=f"fragments with tensors: {sorted(present)}")
    return layout


def _check_step(step: StepRule | None) -> None:
    if step is None:
        return
    betas = 0 <= step.beta1 < 1 and 0 <= step.beta2 < 1
    if not (betas and LEAST_EPS <= step.eps <= 1 and LEAST_FREEZE <= step.freeze_at <= 1):
        raise ProtocolError(
            "the step rule of this layout cannot be",
            cause=f"betas {step.beta1}, {step.beta2}, eps {step.eps}, freeze_at {step.freeze_at}",
            next=f"betas lie in [0, 1), eps in [{LEAST_EPS}, 1], freeze_at in [{LEAST_FREEZE}, 1]",
        )


def _check(tensor: Tensor, fragment_count: int, names: set[str]) -> None:
    problem = ""
    if not 0 < len(tensor.name) <= 512:
        problem = "its name is empty or longer than 512 characters"
    elif tensor.name in names:
        problem = "the name appears twice"
    elif not 0 <= tensor.fragment < fragment_count:
        problem = f"fragment {tensor.fragment} is not one of {fragment_count}"
    elif len(tensor.shape) > 16 or any(not 0 <= size <= MAX_ELEMENTS for size in tensor.shape):
        problem = f"its shape {tensor.shape} cannot be"
    elif tensor.element_count < 1:
        problem = "it has no elements"
    elif not (0 <= tensor.lr_scale <= MAX_SCALE and 0 <= tensor.weight_decay <= MAX_SCALE):
        problem = f"its learning rate scale {tensor.lr_scale} or weight decay {tensor.weight_decay} cannot be"
    if problem:
        raise ProtocolError(f"tensor {tensor.name[:512]!r} is not accepted in a layout", cause=problem)


def _check_parts(tensors: Sequence[Tensor]) -> None:
    """The slices of a parameter cover it, each row once, and it is not there as a whole."""
    wholes = {t.name for t in tensors if t.part is UNSET}
    slices: dict[str, list[tuple[Slice, Tensor]]] = {}
    for tensor in tensors:
        if isinstance(tensor.part, Slice):
            slices.setdefault(tensor.part.of, []).append((tensor.part, tensor))
    for name, found in slices.items():
        problem = "it is there as a whole too" if name in wholes else _problem_of_parts(found)
        if problem:
            raise ProtocolError(f"the slices of {name[:512]!r} are not accepted in a layout", cause=problem)


def _problem_of_parts(found: list[tuple[Slice, Tensor]]) -> str:
    row, rows = 0, found[0][0].rows
    alike = {(part.rows, tensor.shape[1:], tensor.dtype) for part, tensor in found}
    if len(alike) > 1:
        return "they are not of one parameter: number of rows, shape of a row and type differ"
    for part, tensor in sorted(found, key=lambda pair: (pair[0].start, pair[0].stop)):
        if tensor.name != part.name:
            return f"rows [{part.start}:{part.stop}) are named {tensor.name[:512]!r}"
        if not tensor.trainable or not tensor.shape or tensor.shape[0] != part.stop - part.start:
            return f"rows [{part.start}:{part.stop}) have shape {tensor.shape} or are not trained"
        if part.start != row:
            return f"rows from {min(row, part.start)} on are missing or there twice"
        row = part.stop
    return "" if row == rows else f"they end at row {row} of {rows}"


def layout_from_dict(body: dict[str, Any]) -> Layout:
    """Read a layout from outside. Raises ProtocolError when it is not one, or not in storage order."""
    try:
        layout = msgspec.convert(body, Layout)
    except msgspec.ValidationError as error:
        raise ProtocolError("this is not a layout", cause=str(error)) from error
    if make_layout(layout.tensors, layout.fragment_count, layout.step) != layout:
        raise ProtocolError("the tensors of this layout are not in storage order")
    return layout


def check_same_layout(ours: Layout, theirs: Layout) -> None:
    """Raises LayoutMismatchError naming the first tensor that differs."""
    if ours == theirs:
        return
    mine, others = {t.name: t for t in ours.tensors}, {t.name: t for t in theirs.tensors}
    for name in sorted(mine.keys() | others.keys()):
        left, right = mine.get(name), others.get(name)
        if left != right:
            raise LayoutMismatchError(
                f"the model differs from the run's: {name}",
                cause=f"the run has {_describe(left)}, this node has {_describe(right)}",
                next="build the same model on every node (same job, same code, same versions)",
            )
    if ours.step != theirs.step:
        raise LayoutMismatchError(
            "the optimizer differs from the run's",
            cause=f"the run has {ours.step}, this node has {theirs.step}",
            next="use the same optimizer and the same numbers on every node",
        )
    raise LayoutMismatchError(
        "the layout differs from the run's",
        cause=f"{ours.fragment_count} fragments here, {theirs.fragment_count} there",
        next="build the same model on every node",
    )


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "no such tensor"
    notes = ("" if tensor.trainable else ", frozen") + (", by rows" if tensor.row_aligned else "")
    notes += f", lr x {tensor.lr_scale:g}" if tensor.lr_scale != 1 else ""
    notes += f", decay {tensor.weight_decay:g}" if tensor.weight_decay else ""
    return f"{tensor.section} {tensor.dtype}{list(tensor.shape)} in fragment {tensor.fragment}{notes}"

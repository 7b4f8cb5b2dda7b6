"""What ranks tell of a replay, and the verdict: records only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

BINS = 64
"""Numbers of a sketch; the distance it gives is off by a fifth."""
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
"""Relative distances that other kernels or another order of sums may cause, by type. The coarsest type that was seen
so far counts: what is computed from bfloat16 is no better than bfloat16."""
NAMES_MAX = 8
OTHER_WAY = "goes another way"
INPUT, OUTPUT, GRADIENT, PARAMETER_GRADIENT, LOSS = "input", "output", "gradient", "parameter gradient", "loss"


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """How ranks meet for a replay."""

    timeout_s: float = 60.0
    """How long the others are waited for."""
    share: bool = True
    """All replay the batch of rank 0; False: each its own, and the batches are compared."""
    store: Any = None
    """A torch.distributed.Store in which the ranks meet; None: that of the process group."""
    rank: int = 0
    """With a store: which one this is."""
    world: int = 1
    """With a store: how many there are."""
    tolerances: Mapping[str, float] = field(default_factory=lambda: dict(TOLERANCES))


class Seen(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tensor on its way through the model."""

    direction: str
    """forward, loss or backward."""
    path: str
    """The module's; of a parameter's gradient: the parameter's."""
    what: str
    """input, output, gradient (of a module's output), parameter gradient, loss."""
    call: int
    """How often the module was called before."""
    index: int
    """Which tensor of these."""
    digest: bytes
    dtype: str
    shape: tuple[int, ...]
    norm: float
    sketch: bytes
    """BINS float64; empty: no floating numbers."""
    inside: str = ""
    """The module whose forward was running."""
    source: tuple[str, int, int] | None = None
    """Of an input: the module, call and place whose output this very tensor is."""

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """The same on all ranks that go the same way."""
        return self.direction, self.path, self.what, self.call, self.index


class Held(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A parameter or buffer before the replay."""

    digest: bytes
    dtype: str


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to say."""

    rank: int
    model: str
    """Its class."""
    settings: dict[str, str]
    """Versions, kernels, switches."""
    parameters: dict[str, Held]
    buffers: dict[str, Held]
    evaluating: tuple[str, ...]
    """Modules in eval mode."""
    code: dict[str, bytes]
    """Of the modules' forward functions, by class."""
    batch: bytes
    random_before: bytes
    """Of the random states as the program had them."""
    random_after: bytes
    """Of the random states after the replay, which began with the same seed everywhere."""
    seen: tuple[Seen, ...] = ()
    loss: float | None = None
    error: str = ""
    """The exception that ended it."""
    unseen: tuple[str, ...] = ()
    """What could not be looked at, and why."""


class Already(msgspec.Struct, frozen=True, kw_only=True):
    """Something that differed before the replay began."""

    what: str
    names: tuple[str, ...]
    """At most NAMES_MAX."""
    count: int
    ranks: tuple[int, ...]
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The same on all ranks."""

    result: str
    """equal (bit for bit), close (within the tolerance), differs, unknown."""
    cause: str
    """One sentence."""
    fix: str = ""
    direction: str = ""
    """forward, loss or backward: of the first difference."""
    module: str = ""
    """Path; the model itself: its class."""
    what: str = ""
    ranks: tuple[int, ...] = ()
    """Those that differ from the others."""
    distance: float = 0.0
    """Relative, of the one that is farthest; infinite: other type, shape or way."""
    tolerance: float = 0.0
    already: tuple[Already, ...] = ()
    losses: dict[str, float] = {}
    """By rank."""
    compared: int = 0
    """Tensors of each rank."""
    world: int = 1
    missing: tuple[int, ...] = ()
    could_not_look: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class First:
    """The first difference."""

    seen: Seen
    ranks: tuple[int, ...]
    distance: float
    tolerance: float
    how: str

"""What is known about one step whose replicas differ, in the form in which the judges of classes A and D want it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ciuic.doctor.case import Round, odd_ones
from ciuic.doctor.facts import GRADIENTS, PARAMETERS
from ciuic.doctor.facts_model import EXCHANGE, FLOW, MODE
from ciuic.doctor.rules.distance import farthest
from ciuic.doctor.rules.memory import Told

SAME_UP_TO_FACTOR = 1e-3
"""Relative distance that is left when one tensor is multiplied to come closest to the other."""
NONE_DIGEST = b"\0" * 8
"""Of a gradient that is None."""


@dataclass(eq=False, kw_only=True)
class View:
    """One step of one group of replicas."""

    round: Round
    ranks: tuple[int, ...]
    told: Told
    params_differ: bool = False
    grads_differ: bool = False
    is_first: bool = False
    """The first sampled step of this optimizer."""
    leaves: dict[str, dict[str, dict[int, bytes]]] = field(default_factory=dict)
    """By kind: the tensors that differ, with the digest of each rank. Absent: not known."""
    equal: dict[str, int] = field(default_factory=dict)
    """By kind: subtrees that were equal."""
    sketches: dict[str, dict[int, Mapping[str, Any]]] = field(default_factory=dict)
    waits: int = 0
    """Searches that are still open."""

    @property
    def optimizer(self) -> int:
        """Its number."""
        return self.round.optimizer

    @property
    def step(self) -> int:
        """Of that optimizer."""
        return self.round.step

    @property
    def mode(self) -> str:
        """See facts_model.MODE."""
        return next((str(value) for value in self.values(MODE).values()), "plain")

    def values(self, name: str) -> dict[int, Any]:
        """A fact by rank."""
        return {rank: value for rank, value in self.round.values(name).items() if rank in self.ranks}

    def flow(self, at: int) -> dict[int, int]:
        """One of the numbers of FLOW by rank."""
        return {rank: int(value[at]) for rank, value in self.values(FLOW).items()}

    def exchange(self, at: int) -> int:
        """One of the numbers of EXCHANGE, the least of all ranks."""
        values = self.values(EXCHANGE)
        return min((int(values[rank][at]) if rank in values else 0 for rank in self.ranks), default=0)

    def names(self, kind: str) -> list[str]:
        """Of the tensors that differ."""
        return list(self.leaves.get(kind, {}))

    @property
    def differing_gradients(self) -> list[str]:
        """Names of gradients that differ by more than a common factor; all of them when all differ by no more than one.

        When one gradient is not reduced, a norm over all of them differs too, and clipping scales the others apart."""
        names = self.names(GRADIENTS)
        sketches = self.sketches.get(GRADIENTS, {})
        scaled = set()
        for name in names:
            far = farthest(sketches, [name])
            if far is not None and far[1].after_ratio < SAME_UP_TO_FACTOR < abs(far[1].ratio - 1.0) * 1e3:
                scaled.add(name)
        rest = [name for name in names if name not in scaled]
        return rest or names

    def told_names(self, what: str) -> list[str]:
        """Of a NAMES notice, of any rank of the group."""
        return self.told.names(what, self.optimizer, self.ranks)

    def odd(self, kind: str) -> tuple[int, ...]:
        """Ranks that differ from most."""
        first = next(iter(self.leaves.get(kind, {}).values()), None)
        return odd_ones(first if first is not None else self.values(kind))

    @property
    def none_somewhere(self) -> dict[str, tuple[int, ...]]:
        """Gradients that are None on some ranks and not on others: name and the ranks without one."""
        found = {}
        for name, digests in self.leaves.get(GRADIENTS, {}).items():
            without = tuple(rank for rank, digest in sorted(digests.items()) if bytes(digest) == NONE_DIGEST)
            if without and len(without) < len(digests):
                found[name] = without
        return found

    @property
    def is_open(self) -> bool:
        """Whether answers are still to come."""
        return self.waits > 0


KINDS_COMPARED = (PARAMETERS, GRADIENTS)

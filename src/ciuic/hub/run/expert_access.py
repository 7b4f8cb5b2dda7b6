"""How many tokens reach the experts of each fragment, and how much less often the cold ones are pushed. Pure.

Placement goes by bytes and pushes. A fragment costs as many bytes per push whatever its experts do, so the frequency
of access comes in as the frequency of pushes: a fragment whose experts see half of the mean number of tokens is pushed
in every second interval. Then a push of any expert is the work of about as many tokens.
"""

from collections.abc import Mapping, Sequence

from ciuic.ledger.experts import Expert, describe_experts, experts_by_fragment
from ciuic.ledger.layout import Layout

LARGEST_STRETCH = 4
"""Between two pushes a node changes a fragment by what others do not see: not for longer than so many intervals."""
STEADY = 0.7
"""A stretch stays while what is wanted is no further away than this, so that it does not change back and forth."""
NEWEST_SHARE = 0.2
"""Weight of the newest push in the average."""


def averaged(before: float | None, accesses: int, tokens: int) -> float | None:
    """Accesses per token over the latest pushes, with one more push; unchanged when that one does not know."""
    if accesses < 0:
        return before
    now = accesses / max(1, tokens)
    return now if before is None else before + NEWEST_SHARE * (now - before)


def stretch(wanted: float, now: int) -> int:
    """Whole intervals between two pushes, 1 to LARGEST_STRETCH. `wanted`: mean access over this one; `now`: so far."""
    if abs(wanted - now) <= STEADY:
        return now
    return min(LARGEST_STRETCH, max(1, round(min(wanted, LARGEST_STRETCH))))


class Access:
    """The experts of a run by fragment, and what is known of their use."""

    def __init__(self, layout: Layout) -> None:
        self.experts: Sequence[frozenset[Expert]] = experts_by_fragment(layout)
        self._per_token: dict[int, float] = {}
        """Accesses of all experts of a fragment together; what was heard last, also while it moves."""
        self._stretches = [1] * len(self.experts)
        self.has_experts = any(self.experts)

    def hear(self, per_token: Mapping[int, float | None]) -> None:
        """What the places say of their fragments now; None: not known."""
        for fragment, value in per_token.items():
            if value is not None and self.experts[fragment]:
                # a token reaches an expert at most once
                self._per_token[fragment] = min(max(value, 0.0), float(len(self.experts[fragment])))
        counts = {f: len(self.experts[f]) for f in self._per_token}
        mean = sum(self._per_token.values()) / sum(counts.values()) if counts else 0.0
        for fragment, value in self._per_token.items():
            each = value / counts[fragment]
            wanted = mean / each if each > 0 else (float("inf") if mean > 0 else 1.0)
            self._stretches[fragment] = stretch(wanted, self._stretches[fragment])

    @property
    def stretches(self) -> list[int]:
        """Of each fragment; empty when all are 1."""
        return list(self._stretches) if max(self._stretches) > 1 else []

    def stretch_of(self, fragment: int) -> int:
        """Intervals between two pushes of this fragment."""
        return self._stretches[fragment]

    def share(self, fragment: int) -> float | None:
        """Of all accesses to experts, those to this fragment; None when that is not known."""
        total = sum(self._per_token.values())
        if fragment not in self._per_token or total <= 0:
            return None
        return self._per_token[fragment] / total

    def describe(self, fragment: int) -> str:
        """Its experts, like `experts 0-3`; empty for none."""
        return describe_experts(self.experts[fragment])

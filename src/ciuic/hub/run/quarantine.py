"""Outliers: a push that moves a fragment much further than others is clipped or refused. Pure: no files, no clock.

What is compared is the L2 norm of the decoded push. Honest pushes of more steps are longer, between sqrt(n) and n times
for n times as many tokens; the longer of both is what a push may be (`gradient` mode: the norm does not depend on n).
The limit is the median of the latest pushes times `factor`, or `SPREADS` robust standard deviations of their logarithms
above it when that is more; the first push of an incarnation, whose optimizer begins without moments, may be
`FIRST_FACTOR` times as long. Fewer than `LEAST_SEEN` pushes are no measure, and nothing is clipped.

Norm and clipping of each contributor are in the entry's header: a replay takes them from there.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from ciuic.job import Job
from ciuic.ledger.entry import EntryHeader, PushHeader

Mode = Literal["clip", "quarantine", "off"]
Key = tuple[str, int, int]

LEAST_SEEN = 8
WINDOW = 64
"""The latest merged pushes that are the measure."""
SPREADS = 8.0
TO_DEVIATION = 1.4826
"""Median absolute deviation -> standard deviation, of a normal distribution."""
FIRST_FACTOR = 4.0
CARRIED_SHARE = 0.7
"""What a push leaves in the residual of the next one, at most: 0.6 of its length with one bit."""
MOST_STRETCH = 256.0
"""However many tokens a push claims, it may not be longer than for so many times the usual number."""


@dataclass(frozen=True, kw_only=True)
class OutlierRule:
    """What the job says about outliers."""

    mode: Mode = "clip"
    factor: float = 10.0
    set_aside_after: int = 5
    """Outliers in a row after which a node is taken out of the run; 0: never."""
    depends_on_tokens: bool = True
    """False in `gradient` mode."""


Mark = tuple[float, float]
"""Norm of a decoded push, and with what its weight is multiplied."""


def outlier_rule(job: Job) -> OutlierRule:
    """What a job asks for."""
    given = job.security
    return OutlierRule(
        mode=given.outliers,
        factor=given.factor,
        set_aside_after=given.set_aside_after,
        depends_on_tokens=job.sync.send != "gradient",
    )


def clipped_weights(weights: Mapping[Key, float], marks: Mapping[Key, Mark]) -> dict[Key, float]:
    """Weights with the clipping in them, as fp32 numbers."""
    return {key: float(np.float32(weight * marks[key][1])) for key, weight in weights.items()}


class Outliers:
    """The measure of one fragment, and the pushes that wait."""

    def __init__(self, rule: OutlierRule) -> None:
        self.rule = rule
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(logarithm of the clipped norm, tokens) of the latest merged pushes."""
        self._waiting: dict[Key, float] = {}
        """Norms of accepted pushes."""
        self._measured: tuple[float, float, float] | None = None
        self._carried: dict[str, float] = {}
        """Tokens by node that may still be in its residual: after a long push the next ones are longer too."""

    # ---- what comes in

    def wait(self, key: Key, norm: float) -> None:
        """An accepted push waits for its round."""
        self._waiting[key] = norm

    def merged(self, header: EntryHeader) -> None:
        """An entry is durable: its contributors are the measure for the next."""
        self._measured = None
        for one in header.contributors:
            self._waiting.pop((one.node, one.incarnation, one.sequence), None)
            self._carried[one.node] = max(float(one.tokens), CARRIED_SHARE * self._carried.get(one.node, 0.0))
            length = one.norm * one.clip
            if length > 0 and math.isfinite(length):
                self._seen.append((math.log(length), float(one.tokens)))
        for rejection in header.rejected:
            self._waiting.pop((rejection.node, rejection.incarnation, rejection.sequence), None)

    # ---- what is an outlier

    def refusal(self, header: PushHeader, norm: float) -> str:
        """Why this push is not accepted; empty when it is, or when outliers are clipped instead."""
        if self.rule.mode != "quarantine":
            return ""
        limit = self.limit(header)
        if limit is None or norm <= limit:
            return ""
        return f"it moves the fragment by {norm:.3g}, more than the limit of {limit:.3g} by the latest pushes"

    def marks(self, headers: Iterable[PushHeader]) -> dict[Key, Mark]:
        """Norm and clipping of the pushes that a closing round merges."""
        found: dict[Key, Mark] = {}
        for header in headers:
            key = (header.node, header.incarnation, header.sequence)
            norm = self._waiting.get(key, 0.0)
            limit = self.limit(header) if self.rule.mode == "clip" else None
            clip = 1.0 if limit is None or norm <= limit else limit / norm
            found[key] = (norm, clip)
        return found

    def limit(self, header: PushHeader) -> float | None:
        """The longest that this push may be; None while too few were seen."""
        if self.rule.mode == "off" or len(self._seen) < LEAST_SEEN:
            return None
        usual, middle, spread = self._measure()
        reach = max(math.log(self.rule.factor), SPREADS * spread)
        reach += math.log(FIRST_FACTOR) if header.sequence <= 1 else 0.0
        tokens = max(float(header.tokens), self._carried.get(header.node, 0.0))
        exponent = middle + reach + math.log(self._stretch(tokens, usual))
        return math.exp(min(exponent, 700.0))

    def _measure(self) -> tuple[float, float, float]:
        """(usual tokens, middle and spread of the logarithm of the length for so many); the same for a whole round."""
        if self._measured is None:
            usual = median(tokens for _, tokens in self._seen)
            lengths = [length - math.log(self._stretch(tokens, usual)) for length, tokens in self._seen]
            middle = median(lengths)
            spread = TO_DEVIATION * median(abs(length - middle) for length in lengths)
            self._measured = usual, middle, spread
        return self._measured

    def _stretch(self, tokens: float, usual: float) -> float:
        """How much longer than usual a push of so many tokens may be."""
        if not self.rule.depends_on_tokens or usual <= 0:
            return 1.0
        share = min(MOST_STRETCH, max(tokens / usual, 1e-6))
        return max(share, math.sqrt(share))


class SetAside:
    """Outliers in a row, by node, over all fragments of a run."""

    def __init__(self, limit: int) -> None:
        """`limit` 0: nobody is set aside."""
        self._limit = limit
        self._in_a_row: Counter[str] = Counter()
        self.nodes: set[str] = set()

    def saw(self, node: str, *, is_outlier: bool) -> bool:
        """Count a push; True when the node is set aside by it."""
        if not is_outlier:
            self._in_a_row.pop(node, None)
            return False
        self._in_a_row[node] += 1
        if not self._limit or node in self.nodes or self._in_a_row[node] < self._limit:
            return False
        self.nodes.add(node)
        return True


def clipped_lines(header: EntryHeader) -> list[tuple[str, str]]:
    """(node, sentence) for each contributor that was clipped."""
    return [
        (
            one.node,
            f"a push of {one.node} was clipped to {one.clip:.2g} of its length: it moves fragment {header.fragment} "
            f"{1 / one.clip:,.1f} times further than the limit by the latest pushes",
        )
        for one in header.contributors
        if one.clip < 1
    ]

"""The inbox of one fragment and the policies: which pushes wait, when the round closes, what each push weighs. Pure.

sync   A round closes when every expected member has pushed (`complete`), or when enough of them have (min_fraction)
       and the adaptive deadline has passed. Late pushes stay for the next round. Weights are shares of its tokens.
async  Each push makes an entry at once. It weighs 1 / W (1 + s)^-1/2 with W nodes at work and a base s versions
       behind: one push of each together moves the base by their mean, as one round of `sync` does (the tokens per
       update stay), and staler work counts less (arXiv 1903.03934, a = 1/2). W entries are what a round is in `sync`.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from ciuic.ledger.entry import Push, Rejection

Key = tuple[str, int, int]


PolicyKind = Literal["sync", "async"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When a round closes, and what its pushes weigh."""

    kind: PolicyKind = "sync"
    min_fraction: float = 0.67
    """Share of the expected members, rounded to a number of them, without which no deadline closes a round."""
    max_staleness: int = 4
    """A push whose base is older than this many rounds is rejected; its progress stays with its node."""
    deadline_s: float | None = None
    """Fixed wait after the round's first push; None: median + `spread` x MAD of the lateness seen so far."""
    spread: float = 4.0
    floor_s: float = 0.5
    """The adaptive deadline is never shorter: increase it when rounds close without nodes that are barely late."""
    initial_s: float = 30.0
    """The deadline until enough arrivals were seen."""
    history: int = 64
    """How many arrivals the adaptive deadline remembers."""

    def staleness_limit(self, at_work: int) -> int:
        """`max_staleness` in versions, when `at_work` nodes train."""
        return self.max_staleness * (max(1, at_work) if self.kind == "async" else 1)


class Inbox:
    """At most one push per incarnation of a node; decides when the round closes."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.waiting: dict[Key, Push] = {}
        self._senders: Counter[str] = Counter()
        """How many of the waiting pushes each node sent."""
        self._lateness_s: deque[float] = deque(maxlen=policy.history)
        self._usual_s: tuple[float, float] | None = None
        """Its median and the median of the distances from that, once they were asked for."""
        self._first_s: float | None = None
        self._previous_first_s: float | None = None

    def add(self, push: Push, now_s: float, *, late: bool) -> None:
        """An accepted push. Its lateness behind its round's first push teaches the deadline.

        `late`: it was meant for a round that has closed; it waits for the next one but does not start its clock.
        """
        first_s = self._previous_first_s if late else self._first_s
        if first_s is not None:
            self._lateness_s.append(now_s - first_s)
            self._usual_s = None
        elif not late:
            self._first_s = now_s
        if push.key not in self.waiting:
            self._senders[push.header.node] += 1
        self.waiting[push.key] = push

    def forget_lateness(self) -> None:
        """What was seen so far says nothing about how late nodes are."""
        self._lateness_s.clear()
        self._usual_s = None

    def has_from(self, node: str) -> bool:
        return node in self._senders

    def deadline_s(self) -> float:
        """Seconds after the round's first push."""
        policy = self.policy
        if policy.deadline_s is not None:
            return policy.deadline_s
        if len(self._lateness_s) < 4:
            return policy.initial_s
        if self._usual_s is None:
            middle = median(self._lateness_s)
            self._usual_s = middle, median(abs(x - middle) for x in self._lateness_s)
        middle, mad = self._usual_s
        return max(policy.floor_s, middle + policy.spread * mad)

    def may_close(self, fewest: int, now_s: float) -> bool:
        """Whether `decide` is worth asking, found without a look at each member; at least `fewest` are expected."""
        if not self.waiting or self.policy.kind == "async" or len(self._senders) >= fewest:
            return bool(self.waiting)
        if len(self._senders) < self._needed(fewest):
            return False
        due_s = self.due_s()
        return due_s is not None and now_s >= due_s

    def _needed(self, members: int) -> int:
        return max(1, int(self.policy.min_fraction * members + 0.5))

    def decide(self, expected: Iterable[str], now_s: float) -> str:
        """`complete`, `deadline`, `pushed` or "" (go on waiting), given the members that should push in this round."""
        if not self.waiting:
            return ""
        if self.policy.kind == "async":
            return "pushed"
        members = set(expected)
        missing = members - self._senders.keys()
        if not missing:
            return "complete"
        pushed = len(members) - len(missing)
        due_s = self.due_s()
        is_enough = pushed >= self._needed(len(members))
        return "deadline" if due_s is not None and is_enough and now_s >= due_s else ""

    def due_s(self) -> float | None:
        """When the deadline of the present round passes; None before its first push."""
        return None if self._first_s is None else self._first_s + self.deadline_s()

    def select(self, version: int, at_work: int = 1) -> tuple[list[Push], tuple[Rejection, ...]]:
        """What the closing round merges (at most one push per node, the oldest) and what is too stale by now.

        With `async` it merges one push: the one that has waited longest.
        """
        limit = self.policy.staleness_limit(at_work)
        if all(version - p.header.base_version > limit for p in self.waiting.values()):
            version = min(p.header.base_version for p in self.waiting.values())  # an entry needs a contributor
        merged: list[Push] = []
        rejected: list[Rejection] = []
        seen: set[str] = set()
        for key in sorted(self.waiting):
            push = self.waiting[key]
            if version - push.header.base_version > limit:
                node, incarnation, sequence = key
                rejected.append(Rejection(node=node, incarnation=incarnation, sequence=sequence, reason="stale"))
            elif push.header.node not in seen:
                seen.add(push.header.node)
                merged.append(push)
        if self.policy.kind == "async":
            arrived = list(self.waiting)
            merged = [min(merged, key=lambda push: arrived.index(push.key))]
        return merged, tuple(rejected)

    def leftover(self, pushes: list[Push], rejected: tuple[Rejection, ...]) -> tuple[Rejection, ...]:
        """What would stay behind, as rejections: it was made for another kind of step than the next one."""
        settled = {p.key for p in pushes} | {(r.node, r.incarnation, r.sequence) for r in rejected}
        return tuple(
            Rejection(node=node, incarnation=incarnation, sequence=sequence, reason="stale")
            for node, incarnation, sequence in sorted(self.waiting.keys() - settled)
        )

    def weights(self, pushes: list[Push], version: int, at_work: int) -> dict[Key, float]:
        """What each of these pushes is multiplied with, as fp32 numbers, when `at_work` nodes train."""
        if self.policy.kind == "async":
            shares = [(1 + version - p.header.base_version) ** -0.5 / max(1, at_work) for p in pushes]
        else:
            total = sum(p.header.tokens for p in pushes)
            shares = [p.header.tokens / total for p in pushes]
        return {p.key: float(np.float32(share)) for p, share in zip(pushes, shares, strict=True)}

    def remove(self, key: Key) -> Push:
        """Take a push out without merging it."""
        push = self.waiting.pop(key)
        self._senders[push.header.node] -= 1
        if not self._senders[push.header.node]:
            del self._senders[push.header.node]
        return push

    def settle(self, keys: Iterable[Key]) -> None:
        """The round is durable: these pushes have left. The next round's clock starts with its own first push."""
        for key in keys:
            if key in self.waiting:
                self.remove(key)
        self._previous_first_s, self._first_s = self._first_s, None

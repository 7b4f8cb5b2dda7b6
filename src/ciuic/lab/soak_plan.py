"""Which fault happens when in a soak: decided by the seed alone, so that a failure can be repeated.

Each fault heals itself before the next one. Kinds are drawn like cards: every kind once before one comes again. In a
long soak the hub and the first node's agent are spared in the second half, so that their memory and files can be
watched over hours.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = {
    "kill": "kill -9 of everything at a node; it comes back as the node that it was",
    "stop": "SIGSTOP to everything at a node, then SIGCONT",
    "restart": "kill -9 of a node's agent alone; a new agent starts at once",
    "drain": "a node leaves in order and comes back",
    "join": "a node joins with a new identity; the next time it leaves again",
    "cut": "nothing passes between a node and the hub",
    "slow": "a node's link has a twentieth of its rate and 200 ms more each way",
    "hub-kill": "kill -9 of the hub; it starts again from its files",
    "worker-kill": "kill -9 of a node's training process",
    "disk-full": "the hub's files cannot grow",
}
LASTS = {
    "kill": (0.2, 0.5),
    "stop": (0.3, 0.6),
    "drain": (0.1, 0.3),
    "cut": (0.3, 0.6),
    "slow": (0.5, 0.8),
    "hub-kill": (0.1, 0.5),
    "disk-full": (0.2, 0.4),
}
"""Shares of the time until the next fault; what is not here happens in a moment."""
HUB_KINDS = ("hub-kill", "disk-full")
SPARING_FROM = 40
"""Faults in a soak that is long enough to spare somebody in its second half."""
_AGENT_ENDS = ("kill", "restart", "drain")
NEWCOMER = "newcomer"
"""The place of the node that joins and leaves."""


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault, before it happens."""

    number: int
    """From 1."""
    kind: str
    place: str
    """A node's place, or `hub`."""
    lasts_s: float
    """Until it is healed; 0: it heals by itself."""

    @property
    def text(self) -> str:
        lasting = f", for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind} at {self.place}{lasting}"


def plan_faults(seed: int, count: int, places: Sequence[str], every_s: float) -> list[PlannedFault]:
    """The first `count` faults of a soak. A longer soak with the same seed begins in the same way while it is short."""
    chance = random.Random(f"soak {seed}")
    deck: list[str] = []
    found: list[PlannedFault] = []
    for number in range(1, count + 1):
        spares = count >= SPARING_FROM and number > count // 2
        kind = _draw(chance, deck, without=HUB_KINDS if spares else ())
        place = _place(chance, kind, places[1:] if spares and kind in _AGENT_ENDS else places)
        low, high = LASTS.get(kind, (0.0, 0.0))
        lasts_s = round(every_s * chance.uniform(low, high), 2)
        found.append(PlannedFault(number=number, kind=kind, place=place, lasts_s=lasts_s))
    return found


def _draw(chance: random.Random, deck: list[str], *, without: Sequence[str]) -> str:
    while True:
        if not deck:
            deck.extend(KINDS)
            chance.shuffle(deck)
        kind = deck.pop()
        if kind not in without:
            return kind


def _place(chance: random.Random, kind: str, places: Sequence[str]) -> str:
    if kind in HUB_KINDS:
        return "hub"
    return NEWCOMER if kind == "join" else chance.choice(places)

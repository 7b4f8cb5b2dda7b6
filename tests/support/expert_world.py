"""The one-process world with experts: fragments at paces of their own, and pushes that say what tokens reached them."""

import random
from collections import Counter

from ledger_world import World

from ciuic.hub.run.expert_access import LARGEST_STRETCH
from ciuic.ledger.layout import Layout, Slice, Tensor, make_layout

NAMES, INTERVAL = ("n0", "n1", "n2"), 2
EXPERTS = 2
"""Of each fragment but the first."""


class ExpertWorld(World):
    """Nodes push a fragment when its own time has come, and say how many tokens reached its experts."""

    shares = (0.0, 1.0, 0.5, 0.0)
    """Of the tokens of a step, those that reach each expert of a fragment."""

    def make_layout(self, fragments: int) -> Layout:
        tensors = [Tensor(name="embed", shape=(20, 7), dtype="float32", section="coded", row_aligned=True)]
        tensors.append(Tensor(name="batches", shape=(), dtype="int64", section="counter", trainable=False))
        rows = EXPERTS * (fragments - 1)
        for fragment in range(1, fragments):
            part = Slice(
                of="mlp.experts.up", start=rows - EXPERTS * fragment, stop=rows - EXPERTS * (fragment - 1), rows=rows
            )
            shape = (EXPERTS, 9, 5)
            tensors.append(
                Tensor(name=part.name, part=part, shape=shape, dtype="float32", section="coded", fragment=fragment)
            )
        return make_layout(tensors, fragments)

    def push(self, name: str, fragment: int) -> None:
        machine = self.workers[name].machine
        if machine.can_push(fragment, 1):
            tokens = machine.unpushed_tokens(fragment)
            machine.accessed(fragment, int(EXPERTS * tokens * self.shares[fragment]) if fragment else -1)
        super().push(name, fragment)

    def train(self, steps: int, draw: random.Random, lost: float) -> Counter[int]:
        """All nodes go on, each fragment at its pace; frames are late, doubled and answered in vain. Pushes made."""
        made: Counter[int] = Counter()
        self.flown: dict[tuple[str, int], bool] = {}
        self.skips: Counter[tuple[str, int]] = Counter()
        due = {(name, f): INTERVAL for name in NAMES for f in range(self.layout.fragment_count)}
        for step in range(1, steps + 1):
            for name in NAMES:
                self.lease(name, 1)
                self.step(name)
                self._push_due(name, step, due, made)
            for _ in range(len(self.network)):
                self.deliver(draw.randrange(50), keep=draw.random() < lost, lose_reply=draw.random() < lost)
            for name in NAMES:
                for fragment in range(self.layout.fragment_count):
                    if draw.random() > lost:
                        self.pull(name, fragment, 1000)
            self.tick(1.0)
            if step % 4 == 0:
                self.check()
        return made

    def _push_due(self, name: str, step: int, due: dict[tuple[str, int], int], made: Counter[int]) -> None:
        for fragment, replica in enumerate(self.workers[name].machine.replicas):
            if replica.in_flight is None and self.flown.pop((name, fragment), False):
                stretch = self.hub.fragments[fragment].store.entry(replica.version).header.stretch
                assert 1 <= stretch <= LARGEST_STRETCH
                self.skips[name, fragment] = stretch - 1
            if step >= due[name, fragment] and self.workers[name].machine.can_push(fragment, 1):
                due[name, fragment] = step + INTERVAL
                if self.skips[name, fragment] > 0:
                    self.skips[name, fragment] -= 1
                    continue
                self.push(name, fragment)
                made[fragment] += 1
                self.flown[name, fragment] = True

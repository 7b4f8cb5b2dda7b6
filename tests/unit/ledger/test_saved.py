"""Saved, killed, loaded: a machine goes on bit for bit, whatever was in flight."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_world import small_layout

from ciuic.codec import NumpyVectors
from ciuic.errors import FrameError
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import Push, Rejection, StepFacts
from ciuic.ledger.layout import Layout, StepRule, make_layout
from ciuic.ledger.node import NodeMachine, Place
from ciuic.ledger.outer import OuterOptimizer
from ciuic.ledger.saved import load_machine, save_machine

CODECS = ["1-bit", "int4", "2-bit", "bf16", "none"]


def stepping(layout: Layout) -> Layout:
    return make_layout(layout.tensors, layout.fragment_count, StepRule(beta1=0.9, beta2=0.99, eps=1e-8, feedback=True))


class Twin:
    """Two nodes and a hub; `reload` replaces all of them by what was saved."""

    def __init__(self, layout: Layout, codec: str) -> None:
        self.layout, self.codec = layout, codec
        self.hubs = [self._hub(f) for f in range(layout.fragment_count)]
        random = np.random.default_rng(0)
        self.machines = [self._machine("n0"), self._machine("n1")]
        self.thetas: list[list[Any]] = [[], []]
        for hub in self.hubs:
            counters = (0,) if hub.fragment == 0 else ()
            hub.initialize(random.normal(size=hub.element_count).astype(np.float32), counters)
            for machine, thetas in zip(self.machines, self.thetas, strict=True):
                thetas.append(machine.load(hub.fragment, hub.base, 0, counters))
        self.random = np.random.default_rng(1)
        self.waiting: dict[tuple[int, int], Push] = {}

    def _hub(self, fragment: int) -> Aggregator:
        return Aggregator(self.layout, fragment, (self.codec, self.codec), OuterOptimizer(momentum=0.5))

    def _machine(self, name: str) -> NodeMachine:
        return NodeMachine(self.layout, NumpyVectors(), self.codec, Place(run="r", node=name, incarnation=1))

    def event(self, what: str, node: int, fragment: int) -> None:
        machine, theta = self.machines[node], self.thetas[node][fragment]
        moved = self.random.normal(size=len(theta)).astype(np.float32)
        if what == "step":
            if self.layout.step is None:
                for each in self.thetas[node]:
                    each += self.random.normal(size=len(each)).astype(np.float32)
            machine.stepped(3, [(machine.sequences[0], machine.sequences[0] + 1)])
        elif what == "push" and machine.can_push(fragment, 1):
            vector = theta if self.layout.step is None else moved
            self.waiting[node, fragment] = machine.push(fragment, vector, (1,) if fragment == 0 else ())
        elif what in ("close", "reject"):
            self._close(fragment, what)

    def _close(self, fragment: int, what: str) -> None:
        pushes = {key: push for key, push in self.waiting.items() if key[1] == fragment}
        rejected: tuple[Rejection, ...] = ()
        if what == "reject" and len(pushes) == 2:
            header = pushes.pop((0, fragment)).header
            self.waiting.pop((0, fragment))
            rejected = (Rejection(node="n0", incarnation=1, sequence=header.sequence, reason="stale"),)
        if not pushes:
            return
        step = None if self.layout.step is None else StepFacts(lr=1e-2)
        hub = self.hubs[fragment]
        candidate = hub.close(list(pushes.values()), rejected, Facts(run="r", step=step))
        hub.commit(candidate)
        for key in pushes:
            self.waiting.pop(key)
        for machine, thetas in zip(self.machines, self.thetas, strict=True):
            machine.merge(candidate.entry, thetas[fragment])

    def reload(self) -> None:
        saved = [save_machine(machine, thetas) for machine, thetas in zip(self.machines, self.thetas, strict=True)]
        snapshots = [hub.snapshot("r") for hub in self.hubs]
        self.hubs = [self._hub(f) for f in range(self.layout.fragment_count)]
        for hub, snapshot in zip(self.hubs, snapshots, strict=True):
            hub.restore(snapshot)
        self.machines = [self._machine("n0"), self._machine("n1")]
        self.thetas = [load_machine(machine, data) for machine, data in zip(self.machines, saved, strict=True)]

    def everything(self) -> list[bytes]:
        return [save_machine(m, t) for m, t in zip(self.machines, self.thetas, strict=True)] + [
            x.tobytes() for hub in self.hubs for x in (hub.base, hub.residual)
        ]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["step", "step", "push", "close", "reject"]), st.integers(0, 1), st.integers(0, 1)),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, at=st.integers(0, 30), codec=st.sampled_from(CODECS), gradients=st.booleans())
def test_a_run_that_was_saved_killed_and_loaded_equals_the_uninterrupted_one_bit_for_bit(
    events: list[tuple[str, int, int]], at: int, codec: str, gradients: bool
) -> None:
    layout = stepping(small_layout(2)) if gradients else small_layout(2)
    whole, broken = Twin(layout, codec), Twin(layout, codec)
    for number, event in enumerate(events):
        if number == at:
            broken.reload()
        whole.event(*event)
        broken.event(*event)
    broken.reload()
    assert whole.everything() == broken.everything()


def test_a_damaged_or_foreign_state_is_refused_before_anything_changes() -> None:
    twin = Twin(small_layout(2), "1-bit")
    data = save_machine(twin.machines[0], twin.thetas[0])
    other = Twin(small_layout(1), "1-bit")
    before = other.everything()
    with pytest.raises(FrameError, match="another model"):
        load_machine(other.machines[0], data)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    with pytest.raises(FrameError, match="checksum"):
        load_machine(twin.machines[1], bytes(flipped))
    assert other.everything() == before

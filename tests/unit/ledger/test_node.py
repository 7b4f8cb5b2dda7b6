"""The node's machine over several fragments."""

import numpy as np
from ledger_world import small_layout

from ciuic.codec import NumpyVectors
from ciuic.ledger.node import NodeMachine, Place


def machine_with(fragments: int) -> tuple[NodeMachine, list[np.ndarray]]:
    layout = small_layout(fragments)
    machine = NodeMachine(layout, NumpyVectors(), "int8", Place(run="r", node="n0", incarnation=2))
    counts = [layout.fragment_shape(f).element_count for f in range(fragments)]
    return machine, [machine.load(f, np.ones(count, np.float32), 5) for f, count in enumerate(counts)]


def test_fragments_push_by_themselves_and_number_their_own_pushes() -> None:
    machine, theta = machine_with(3)
    machine.stepped(10, [(0, 4)])
    assert all(machine.can_push(f, 10) for f in range(3))
    first = machine.push(1, theta[1])
    assert not machine.can_push(1, 1)
    assert machine.can_push(0, 10)
    assert first.header.base_version == 5
    assert [machine.push(f, theta[f]).header.sequence for f in (0, 2)] == [1, 1]


def test_samples_and_counters_are_reported_with_fragment_0_only_and_tokens_with_each() -> None:
    machine, theta = machine_with(2)
    machine.stepped(10, [(0, 4)])
    machine.stepped(5, [(4, 6)])
    headers = [machine.push(f, theta[f], (3,)).header for f in range(2)]
    assert [h.ranges for h in headers] == [((0, 6),), ()]
    assert [h.tokens for h in headers] == [15, 15]
    assert [h.counters for h in headers] == [(3,), ()]
    assert {h.codec for h in headers} == {"int8"}
    assert len({h.layout_digest for h in headers}) == 1


def test_a_push_says_how_many_tokens_reached_its_experts_also_those_of_a_refused_one() -> None:
    machine, theta = machine_with(2)
    machine.stepped(10, [(0, 4)])
    assert machine.push(0, theta[0]).header.accesses == -1  # nobody said
    machine.accessed(1, 7)
    first = machine.push(1, theta[1])
    assert first.header.accesses == 7
    machine.rejected(1, first.header.sequence)
    machine.stepped(10, [(4, 8)])
    machine.accessed(1, 5)
    again = machine.push(1, theta[1])
    assert (again.header.tokens, again.header.accesses) == (20, 12)
    machine.rejected(1, again.header.sequence)
    machine.accessed(1, -1)
    assert machine.push(1, theta[1]).header.accesses == -1

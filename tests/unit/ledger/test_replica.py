"""The node's machine, event by event: where the progress of a step is, and that nothing is lost or counted twice.

Random schedules are in test_protocol_machine.py; here each fact has its own test.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
from codec_cases import same_bits, vector
from hypothesis import given
from hypothesis import strategies as st
from ledger_frames import RUN, aggregator, push_of, tiny_layout

from ciuic.codec import CODEC_NAMES, NumpyVectors
from ciuic.errors import ConflictError, DigestMismatchError, NonFiniteError, ProtocolError
from ciuic.ledger.aggregate import Facts
from ciuic.ledger.entry import Entry, Push, Rejection
from ciuic.ledger.node import NodeMachine, Place
from ciuic.ledger.replica import Progress, Replica


class Node:
    """One node and the hub's machine, without anything between them."""

    def __init__(self, codec: str = "1-bit") -> None:
        self.hub = aggregator(codec)
        place = Place(run=RUN, node="n0", incarnation=1, epoch=3)
        self.machine = NodeMachine(tiny_layout(), NumpyVectors(), codec, place)
        self.theta = self.machine.load(0, self.hub.base, 0, self.hub.counters)
        self.samples = 0

    @property
    def replica(self) -> Replica:
        return self.machine.replicas[0]

    def step(self, seed: int = 1) -> None:
        self.theta += vector("normal", len(self.theta), seed) * np.float32(0.1)
        self.machine.stepped(10, [(self.samples, self.samples + 1)])
        self.samples += 1

    def push(self) -> Push:
        return self.machine.push(0, self.theta, (1, 1))

    def entry(self, *pushes: Push, rejected: Push | None = None) -> Entry:
        """The next entry, not merged here yet."""
        rejections: tuple[Rejection, ...] = ()
        if rejected is not None:
            node, incarnation, sequence = rejected.key
            rejections = (Rejection(node=node, incarnation=incarnation, sequence=sequence, reason="stale"),)
        candidate = self.hub.close(list(pushes), rejections, Facts(run=RUN))
        self.hub.commit(candidate)
        return candidate.entry

    def merge(self, entry: Entry) -> None:
        self.machine.merge(entry, self.theta)


def another(node: Node, seed: int = 0) -> Push:
    """A push of some other node."""
    return push_of(vector("normal", 85, seed), node="n9", codec=next(iter(node.hub.codecs_up)), sequence=seed + 1)


# ---- pushing


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_push_says_what_was_trained_and_leaves_theta_alone(codec: str) -> None:
    node = Node(codec)
    for _ in range(3):
        node.step()
    before = node.theta.copy()
    push = node.push()
    header = push.header
    assert same_bits(node.theta, before)
    assert (header.tokens, header.ranges, header.sequence) == (30, ((0, 3),), 1)
    assert (header.run, header.node, header.incarnation, header.epoch) == (RUN, "n0", 1, 3)
    assert (header.codec, header.counters, header.layout_digest) == (codec, (1, 1), tiny_layout().digest)
    assert header.base_version == 0
    node.hub.check(push)


def test_what_compression_drops_is_in_the_residual_and_in_the_next_push() -> None:
    node = Node()
    start = node.theta.copy()
    node.step()
    first = node.push()
    q = NumpyVectors().codec("1-bit", tiny_layout().fragment_shape(0)).decode(first.payload)
    assert np.allclose(start - node.theta - q, node.replica.e, atol=1e-6)
    node.merge(node.entry(first))
    residual = node.replica.e.copy()
    node.step(2)
    d = node.replica.base - node.theta
    second = node.push()
    q = NumpyVectors().codec("1-bit", tiny_layout().fragment_shape(0)).decode(second.payload)
    assert np.allclose(d + residual - q, node.replica.e, atol=1e-6)


def test_there_is_one_push_in_flight_at_most() -> None:
    node = Node()
    assert not node.machine.can_push(0, 1)
    with pytest.raises(ConflictError, match="nothing to push"):
        node.push()
    node.step()
    assert node.machine.can_push(0, 10)
    assert not node.machine.can_push(0, 11)
    assert node.machine.unpushed_tokens() == 10
    node.push()
    node.step()
    assert not node.machine.can_push(0, 1)
    with pytest.raises(ConflictError):
        node.push()


def test_sequence_numbers_grow_also_after_a_refusal() -> None:
    node = Node()
    node.step()
    first = node.push()
    node.machine.rejected(0, first.header.sequence)
    second = node.push()
    assert (first.header.sequence, second.header.sequence) == (1, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2e30])
def test_progress_that_is_not_finite_names_its_parameter_and_never_touches_the_residual(bad: float) -> None:
    node = Node()
    node.step()
    node.merge(node.entry(node.push()))
    residual = node.replica.e.copy()
    node.step()
    node.theta[36] = bad
    with pytest.raises(NonFiniteError, match=r"matrix\[1\]"):
        node.push()
    assert same_bits(node.replica.e, residual)
    assert node.replica.in_flight is None
    assert node.machine.discard(0, node.theta) == [(1, 2)]
    assert same_bits(node.theta, node.replica.base)
    assert not node.machine.can_push(0, 1)
    node.step()
    node.push()


def test_giving_up_progress_keeps_what_is_in_flight() -> None:
    node = Node("none")
    node.step()
    push = node.push()
    pushed = node.theta.copy()
    node.step()
    node.theta[0] = np.nan
    assert node.machine.discard(0, node.theta) == [(1, 2)]
    assert np.allclose(node.theta, pushed, atol=1e-6)
    node.merge(node.entry(push))
    assert np.allclose(node.theta, pushed, atol=1e-6)


# ---- merging


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_without_steps_meanwhile_theta_is_the_base_bit_for_bit(codec: str) -> None:
    node = Node(codec)
    node.step()
    node.merge(node.entry(node.push()))
    assert same_bits(node.theta, node.replica.base)
    assert same_bits(node.replica.base, node.hub.base)
    node.merge(node.entry(another(node)))
    assert same_bits(node.theta, node.hub.base)


@given(before=st.integers(0, 3), meanwhile=st.integers(0, 3), codec=st.sampled_from(CODEC_NAMES))
def test_steps_made_while_an_entry_was_on_its_way_are_kept(before: int, meanwhile: int, codec: str) -> None:
    node = Node(codec)
    for seed in range(before + 1):
        node.step(seed)
    push = node.push()
    at_push = node.theta.copy()
    for seed in range(meanwhile):
        node.step(10 + seed)
    steps = node.theta - at_push
    node.merge(node.entry(push, another(node)))
    assert np.allclose(node.theta, node.hub.base + steps, atol=1e-5)
    assert not node.replica.F.any()
    assert node.machine.unpushed_tokens() == 10 * meanwhile


def test_an_entry_without_the_push_leaves_it_in_flight_and_its_progress_in_theta() -> None:
    node = Node("none")
    node.step()
    node.push()
    moved = node.theta - node.replica.base
    node.merge(node.entry(another(node)))
    assert node.replica.in_flight is not None
    assert np.allclose(node.theta, node.hub.base + moved, atol=1e-5)
    assert np.allclose(node.replica.F, moved, atol=1e-5)


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("by_entry", [True, False])
def test_a_refused_push_is_as_if_it_had_not_been_tried(codec: str, by_entry: bool) -> None:
    node = Node(codec)
    node.step(1)
    node.merge(node.entry(node.push()))
    residual = node.replica.e.copy()
    node.step(2)
    node.step(3)
    moved = node.theta - node.replica.base
    push = node.push()
    if by_entry:
        node.merge(node.entry(another(node), rejected=push))
    else:
        node.machine.rejected(0, push.header.sequence)
    assert np.allclose(node.replica.e, residual, atol=1e-5)
    assert np.allclose(node.theta - node.replica.base, moved, atol=1e-5)
    assert not node.replica.F.any()
    again = node.push()
    assert again.header.ranges == push.header.ranges == ((1, 3),)
    assert again.header.tokens == push.header.tokens
    assert again.header.sequence == push.header.sequence + 1


def test_the_samples_of_a_refused_push_come_before_those_trained_since() -> None:
    node = Node()
    node.step()
    push = node.push()
    node.step()
    node.machine.rejected(0, push.header.sequence)
    again = node.push()
    assert (again.header.tokens, again.header.ranges) == (20, ((0, 2),))


def test_a_refusal_that_comes_late_or_for_another_push_does_nothing() -> None:
    node = Node()
    node.step()
    push = node.push()
    node.machine.rejected(0, push.header.sequence + 1)
    assert node.replica.in_flight is not None
    node.merge(node.entry(push))
    before = node.theta.copy()
    node.machine.rejected(0, push.header.sequence)
    node.replica.reject()
    assert same_bits(node.theta, before)


# ---- entries that are not the next one


def changed(entry: Entry, **changes: Any) -> Entry:
    return Entry(header=msgspec.structs.replace(entry.header, **changes), payload=entry.payload)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": 2}, ProtocolError),
        ({"version": 0}, ProtocolError),
        ({"fragment": 1}, ProtocolError),
        ({"codec": "int8"}, ProtocolError),
        ({"previous_digest": "0" * 32}, DigestMismatchError),
    ],
    ids=str,
)
def test_an_entry_that_is_not_the_next_one_is_refused_before_anything_changes(
    changes: dict[str, Any], error: type[ProtocolError]
) -> None:
    node = Node()
    node.step()
    push = node.push()
    entry = node.entry(push)
    theta, base = node.theta.copy(), node.replica.base.copy()
    with pytest.raises(error):
        node.replica.merge(changed(entry, **changes), node.theta, outcome="merged")
    assert same_bits(node.theta, theta)
    assert same_bits(node.replica.base, base)
    assert node.replica.in_flight is not None
    node.merge(entry)
    with pytest.raises(ProtocolError, match="not the next one"):
        node.merge(entry)  # twice


def test_a_base_that_came_out_different_here_is_an_error_with_both_digests() -> None:
    node = Node()
    entry = node.entry(another(node))
    with pytest.raises(DigestMismatchError, match="came out different here") as caught:
        node.merge(changed(entry, digest="0" * 32))
    assert node.hub.digest[:12] in caught.value.cause
    assert "0" * 12 in caught.value.cause


def test_a_flipped_bit_of_the_base_is_seen_with_the_next_entry() -> None:
    node = Node()
    node.replica.base.view(np.uint32)[3] ^= np.uint32(1)
    with pytest.raises(DigestMismatchError, match="came out different"):
        node.merge(node.entry(another(node)))


def test_loading_a_base_again_forgets_everything_else() -> None:
    node = Node()
    node.step()
    node.push()
    node.step()
    node.theta = node.machine.load(0, node.hub.base, 0, node.hub.counters)
    replica = node.replica
    assert not replica.e.any()
    assert not replica.F.any()
    assert replica.in_flight is None
    assert node.machine.unpushed_tokens() == 0
    assert same_bits(node.theta, node.hub.base)
    assert not np.shares_memory(node.theta, replica.base)
    node.theta += 1
    assert same_bits(replica.base, node.hub.base)


def test_neighbouring_samples_are_one_range() -> None:
    progress = Progress()
    progress.add(3, [(0, 2), (2, 5)])
    progress.add(2, ((5, 6), (9, 10)))
    assert (progress.tokens, progress.ranges) == (5, [(0, 6), (9, 10)])


def test_counters_of_entries_are_known_to_the_replica() -> None:
    node = Node()
    node.merge(node.entry(push_of(node="n9", counters=(7, 3))))
    assert node.replica.counters == node.hub.counters == (7, 3)

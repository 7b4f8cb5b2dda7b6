"""The hub's machine: what becomes of pushes."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from codec_cases import same_bits, vector
from hypothesis import given
from hypothesis import strategies as st
from ledger_frames import RUN, aggregator, close_round, decoded, push_of, tiny_layout

from ciuic.codec import CODEC_NAMES, FragmentCodec
from ciuic.errors import FrameError, LayoutMismatchError, NonFiniteError
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import Push, Rejection, base_digest
from ciuic.ledger.outer import OuterOptimizer


def pushes_of(count: int, codec: str = "none", tokens: tuple[int, ...] = ()) -> list[Push]:
    weights = tokens or (10,) * count
    return [push_of(node=f"n{i}", codec=codec, tokens=weights[i]) for i in range(count)]


# ---- weights and order


@given(tokens=st.lists(st.integers(1, 2**40), min_size=1, max_size=5).map(tuple))
def test_the_mean_is_weighted_by_tokens(tokens: tuple[int, ...]) -> None:
    hub = aggregator("none")
    before = hub.base.astype(np.float64)
    pushes = pushes_of(len(tokens), tokens=tokens)
    close_round(hub, pushes)
    mean = sum(t * decoded(p).astype(np.float64) for t, p in zip(tokens, pushes, strict=True)) / sum(tokens)
    assert np.abs(before - mean - hub.base).max() < 1e-6


def test_a_node_that_trained_four_times_as_much_counts_four_times() -> None:
    hub = aggregator("none")
    ones = np.ones(hub.element_count, np.float32)
    before = hub.base.copy()
    close_round(hub, [push_of(ones, node="a", codec="none", tokens=100), push_of(0 * ones, codec="none", tokens=400)])
    assert np.allclose(before - hub.base, 0.2, atol=1e-6)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_the_order_of_arrival_changes_no_bit(codec: str) -> None:
    pushes = pushes_of(4, codec, tokens=(3, 7, 11, 2))
    results = []
    for order in itertools.permutations(pushes):
        hub = aggregator(codec, lr=0.7, momentum=0.9)
        entry = close_round(hub, list(order))
        results.append((entry.header, entry.payload.tobytes(), hub.base.tobytes(), hub.residual.tobytes()))
    assert len(results) == 24
    assert all(result == results[0] for result in results)
    assert [c.node for c in results[0][0].contributors] == ["n0", "n1", "n2", "n3"]


# ---- the outer optimizer


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.0), (0.7, 0.9), (1.0, 0.5)])
def test_the_outer_optimizer_is_torch_sgd_with_nesterov(lr: float, momentum: float) -> None:
    hub = aggregator("none", lr=lr, momentum=momentum)
    parameter = torch.nn.Parameter(torch.from_numpy(hub.base.copy()).double())
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for number in range(1, 13):
        push = push_of(codec="none", sequence=number, base_version=hub.version)
        parameter.grad = torch.from_numpy(decoded(push)).double()
        optimizer.step()
        close_round(hub, [push])
        assert np.abs(hub.base - parameter.detach().numpy()).max() < 1e-6


def test_plain_averaging_of_one_node_gives_its_parameters() -> None:
    hub = aggregator("none")
    target = vector("normal", hub.element_count, 5)
    close_round(hub, [push_of(hub.base - target, codec="none")])
    assert np.allclose(hub.base, target, atol=1e-6)


# ---- residual, digests, counters


@given(codec=st.sampled_from(CODEC_NAMES), seeds=st.lists(st.integers(0, 99), min_size=1, max_size=6))
def test_what_was_not_sent_stays_in_the_residual(codec: str, seeds: list[int]) -> None:
    hub = aggregator(codec)
    down = FragmentCodec(codec, tiny_layout().fragment_shape(0))
    first, wanted, sent = hub.base.astype(np.float64), np.zeros(hub.element_count), np.zeros(hub.element_count)
    for number, seed in enumerate(seeds, start=1):
        push = push_of(vector("normal", hub.element_count, seed), codec=codec, sequence=number)
        entry = close_round(hub, [push])
        wanted += decoded(push)
        sent += down.decode(entry.payload)
    assert np.abs(wanted - sent - hub.residual).max() < 1e-4
    assert np.abs(first - sent - hub.base).max() < 1e-4


def test_closing_changes_nothing_before_it_is_committed() -> None:
    hub = aggregator("int4", momentum=0.9)
    close_round(hub, [push_of(codec="int4")])

    def state() -> list[Any]:
        momentum = hub.outer_state.momentum
        assert momentum is not None
        vectors = [v.tobytes() for v in (hub.base, hub.residual, momentum)]
        return [hub.version, hub.digest, hub.counters, *vectors]

    before = state()
    pushes = [push_of(codec="int4", sequence=2)]
    first, second = hub.close(pushes, (), Facts(run=RUN)), hub.close(pushes, (), Facts(run=RUN))
    assert state() == before
    assert first.entry.to_frame() == second.entry.to_frame()
    hub.commit(first)
    assert hub.version == 2
    assert state() != before


def test_an_entry_names_its_base_before_and_after_and_who_made_it() -> None:
    hub = aggregator()
    start = hub.digest
    rejection = Rejection(node="n9", incarnation=1, sequence=1, reason="stale")
    facts = Facts(run=RUN, epoch=4, samples_committed=7, time=1.5, why="deadline")
    candidate = hub.close([push_of(node="b", tokens=3, ranges=((0, 2),))], (rejection,), facts)
    header = candidate.entry.header
    assert (header.previous_digest, header.digest) == (start, base_digest(candidate.base, (1, 2)))
    assert (header.version, header.epoch, header.samples_committed, header.why) == (1, 4, 7, "deadline")
    assert header.rejected == (rejection,)
    assert [(c.node, c.tokens, c.ranges, c.staleness) for c in header.contributors] == [("b", 3, ((0, 2),), 0)]
    hub.commit(candidate)
    late = close_round(hub, [push_of(node="c", base_version=0)])
    assert late.header.previous_digest == header.digest
    assert late.header.contributors[0].staleness == 1


def test_counters_take_the_maximum_and_never_fall() -> None:
    hub = aggregator()
    close_round(hub, [push_of(node="a", counters=(5, 1)), push_of(node="b", counters=(3, 9))])
    assert hub.counters == (5, 9)
    entry = close_round(hub, [push_of(node="a", sequence=2, counters=(4, 12))])
    assert hub.counters == entry.header.counters == (5, 12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_machine_restored_from_its_snapshot_goes_on_bit_for_bit(momentum: float) -> None:
    hub, again = aggregator("int4", momentum=momentum), aggregator("int4", momentum=momentum)
    for number in range(1, 4):
        close_round(hub, [push_of(codec="int4", sequence=number)])
    again.restore(hub.snapshot(RUN))
    assert not np.shares_memory(again.base, hub.base)
    for number in range(4, 7):
        push = push_of(codec="int4", sequence=number)
        assert close_round(again, [push]).to_frame() == close_round(hub, [push]).to_frame()
    assert same_bits(again.base, hub.base)


# ---- what is refused


@pytest.mark.parametrize(
    "changes",
    [{"layout_digest": "0" * 32}, {"codec": "int8"}, {"fragment": 1}, {"counters": ()}, {"counters": (1, 2, 3)}],
    ids=str,
)
def test_a_push_for_another_layout_codec_or_fragment_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutMismatchError, match="the push of n0"):
        aggregator().check(push_of(**changes))


@pytest.mark.parametrize(
    ("place", "name"), [(0, "embed[0]"), (36, "matrix[1]"), (80, "norm[0]"), (83, "mean[0]"), (84, "mean[1]")]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_push_with_a_value_that_is_not_finite_is_refused_with_its_parameter(
    place: int, name: str, bad: float
) -> None:
    hub = aggregator("none")
    values = vector("normal", hub.element_count)
    values[place] = bad
    with pytest.raises(NonFiniteError, match="the push of n0 holds") as caught:
        hub.check(push_of(values, codec="none"))
    assert name in caught.value.message


def test_a_push_whose_scale_is_infinite_is_refused() -> None:
    good = push_of()
    payload = good.payload.copy()
    scales = FragmentCodec("1-bit", tiny_layout().fragment_shape(0))
    payload[scales.coded_bytes - 2 : scales.coded_bytes] = [0x80, 0x7F]  # bfloat16 infinity
    with pytest.raises(NonFiniteError, match="matrix"):
        aggregator().check(Push(header=good.header, payload=payload))


def test_a_push_of_another_size_is_refused() -> None:
    good = push_of()
    with pytest.raises(FrameError, match="the payload has"):
        aggregator().check(Push(header=good.header, payload=good.payload[:-1]))


@given(codec=st.sampled_from(CODEC_NAMES), values=st.lists(st.sampled_from([1e30, -1e30, 1.0, 0.0]), min_size=2))
def test_the_largest_pushes_that_are_accepted_leave_everything_finite(codec: str, values: list[float]) -> None:
    hub = aggregator(codec, lr=1.0, momentum=0.9)
    for number, value in enumerate(values[:6], start=1):
        push = push_of(np.full(hub.element_count, value, np.float32), codec=codec, sequence=number)
        hub.check(push)
        close_round(hub, [push])
    for part in (hub.base, hub.residual, hub.outer_state.momentum):
        assert part is not None
        assert np.isfinite(part).all()


def test_only_an_outer_momentum_costs_memory() -> None:
    layout = tiny_layout()
    assert Aggregator(layout, 0, ("int8", "1-bit"), OuterOptimizer()).outer_state.momentum is None
    with_momentum = Aggregator(layout, 0, ("int8", "1-bit"), OuterOptimizer(momentum=0.1))
    assert with_momentum.outer_state.momentum is not None

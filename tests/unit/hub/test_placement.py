"""Placement: even loads, few moves, and nothing moves that must stay."""

from hypothesis import given
from hypothesis import strategies as st

from ciuic.hub.shards.placement import LEAST_GAIN, Rates, Traffic, loads, place, rebalance

WEIGHTS = st.dictionaries(st.integers(0, 12), st.floats(0.0, 1e6), min_size=1)
NAMES = st.sets(st.sampled_from(["s1", "s2", "s3", "s4"]), min_size=1)


@given(weights=WEIGHTS, names=NAMES)
def test_every_fragment_gets_one_place_and_no_place_carries_much_more_than_another(
    weights: dict[int, float], names: set[str]
) -> None:
    owners = place(weights, {}, sorted(names))
    assert owners.keys() == weights.keys()
    assert set(owners.values()) <= names
    load = loads(weights, owners, names)
    assert max(load.values()) - min(load.values()) <= max(weights.values())


def test_fixed_fragments_keep_their_place_and_count() -> None:
    owners = place({0: 5.0, 1: 3.0, 2: 3.0, 3: 1.0}, {0: "s1"}, ["s1", "s2"])
    assert owners == {0: "s1", 1: "s2", 2: "s2", 3: "s1"}


@given(weights=WEIGHTS, names=NAMES, data=st.data())
def test_moves_lower_the_largest_load_and_take_only_what_may_move(
    weights: dict[int, float], names: set[str], data: st.DataObject
) -> None:
    owners = {f: data.draw(st.sampled_from(["", *sorted(names)])) for f in weights}
    fixed = data.draw(st.sets(st.sampled_from(sorted(weights))))
    moves = rebalance(weights, owners, names, fixed)
    assert not moves.keys() & fixed
    assert set(moves.values()) <= names
    before, after = loads(weights, owners, names), loads(weights, owners | moves, names)
    assert max(after.values()) <= max(before.values())
    if not moves:
        return
    fullest = max(before, key=lambda name: (before[name], name))  # another may be about as full, and stay so
    assert after[fullest] <= before[fullest] * (1 - LEAST_GAIN)
    assert rebalance(weights, owners | moves, names, fixed | moves.keys()) == {}


def test_a_new_shard_gets_half_and_a_balanced_run_moves_nothing() -> None:
    owners = dict.fromkeys(range(1, 5), "s1") | {0: ""}
    weights = dict.fromkeys(range(5), 10.0)
    moves = rebalance(weights, owners, ["s1", "s2"], {0})
    assert sorted(moves.values()) == ["s2", "s2"]
    assert rebalance(weights, owners | moves, ["s1", "s2"], {0}) == {}


def test_a_fragment_that_is_pushed_more_often_weighs_more() -> None:
    traffic = Traffic()
    for second in range(30):
        traffic.observe(1, 1000.0 + second, 4, 4000, 1000)
        if second % 10 == 0:
            traffic.observe(2, 1000.0 + second, 4, 4000, 1000)
    often, seldom = traffic.rates(1, 1030.0), traffic.rates(2, 1030.0)
    assert often.pushes_per_s == 4.0
    assert often.push_bytes_per_s == 4000.0
    assert often.weight(4) > 9 * seldom.weight(4)
    assert traffic.rates(1, 1200.0) == Rates(), "it was quiet for a minute"
    assert traffic.rates(7, 1030.0) == Rates()

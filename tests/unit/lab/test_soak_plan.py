"""The faults of a soak follow from its seed."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ciuic.lab.soak_plan import HUB_KINDS, KINDS, NEWCOMER, SPARING_FROM, plan_faults

PLACES = ("n1", "n2", "n3")
SEEDS = st.integers(0, 2**32)


@given(seed=SEEDS, count=st.integers(1, 300))
def test_the_same_seed_makes_the_same_faults(seed: int, count: int) -> None:
    assert plan_faults(seed, count, PLACES, 12.0) == plan_faults(seed, count, PLACES, 12.0)


@given(seed=SEEDS, count=st.integers(1, SPARING_FROM - 1), fewer=st.integers(1, SPARING_FROM - 1))
def test_a_shorter_soak_is_the_beginning_of_a_longer_one(seed: int, count: int, fewer: int) -> None:
    short = plan_faults(seed, min(fewer, count), PLACES, 12.0)
    assert plan_faults(seed, count, PLACES, 12.0)[: len(short)] == short


@given(seed=SEEDS)
def test_every_kind_comes_once_before_one_comes_again(seed: int) -> None:
    plan = plan_faults(seed, 2 * len(KINDS), PLACES, 30.0)
    for half in (plan[: len(KINDS)], plan[len(KINDS) :]):
        assert Counter(fault.kind for fault in half) == Counter(list(KINDS))


@given(seed=SEEDS, every_s=st.floats(2.0, 600.0))
def test_a_fault_is_healed_before_the_next_one(seed: int, every_s: float) -> None:
    for fault in plan_faults(seed, 60, PLACES, every_s):
        assert 0 <= fault.lasts_s < every_s
        assert fault.place in {"hub": HUB_KINDS}.get(fault.place, KINDS) or fault.place in (*PLACES, "hub", NEWCOMER)
        assert (fault.place == "hub") == (fault.kind in HUB_KINDS)


@given(seed=SEEDS)
def test_a_long_soak_spares_the_hub_and_one_agent_in_its_second_half(seed: int) -> None:
    late = plan_faults(seed, 240, PLACES, 30.0)[120:]
    assert not [fault for fault in late if fault.kind in HUB_KINDS]
    assert not [f for f in late if f.place == "n1" and f.kind in ("kill", "restart", "drain")]
    assert {fault.place for fault in late} == {*PLACES, NEWCOMER}
    assert {fault.kind for fault in late} == KINDS.keys() - set(HUB_KINDS)


def test_other_seeds_make_other_faults() -> None:
    assert len({tuple(f.kind for f in plan_faults(seed, 20, PLACES, 12.0)) for seed in range(20)}) == 20

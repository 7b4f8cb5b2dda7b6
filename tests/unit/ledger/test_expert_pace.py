"""Fragments that are pushed at paces of their own, by how many tokens reach their experts: the invariants hold."""

import random

import pytest
from expert_world import ExpertWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_frames import memory_folder

STEPS = 40


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    fragments=st.integers(2, 4),
    codec=st.sampled_from(["1-bit", "int8", "none"]),
    lost=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_fragments_at_different_paces_lose_nothing(seed: int, fragments: int, codec: str, lost: float) -> None:
    with memory_folder() as folder:
        world = ExpertWorld(folder, nodes=3, fragments=fragments, codec=codec, total=120, max_staleness=3)
        try:
            world.train(STEPS, random.Random(seed), lost)
            world.crash_hub()
            world.drain()
            world.check()
            world.check_hub_residual()
            assert world.hub.samples.complete
            assert world.hub.samples.duplicated == 0
            replicas = [worker.machine.replicas for worker in world.workers.values()]
            assert len({tuple(r.digest for r in mine) for mine in replicas}) == 1
            assert not any(r.progress.tokens or r.in_flight for mine in replicas for r in mine), "work was left behind"
        finally:
            world.hub.close()


def test_a_fragment_whose_experts_get_few_tokens_makes_fewer_rounds() -> None:
    with memory_folder() as folder:
        world = ExpertWorld(folder, nodes=3, fragments=4, codec="int8", total=500, max_staleness=3)
        try:
            made = world.train(STEPS, random.Random(0), lost=0.0)
            versions = [fragment.version for fragment in world.hub.fragments]
        finally:
            world.hub.close()
    stretches = world.hub.stretches()
    assert stretches == [1, 1, 1, 4]  # the mean is 0.5, and the last gets nothing
    assert made[0] == pytest.approx(made[1], abs=3)
    assert made[3] < 0.5 * made[1]
    assert versions[3] < 0.5 * versions[1]

"""`gradient` mode under random schedules: lost answers, late pushes, deaths, kills of the hub, the frozen phase."""

import pytest
from gradient_world import GradientWorld
from ledger_frames import memory_folder


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("frozen", [False, True], ids=["adamw", "1-bit-adam"])
@pytest.mark.parametrize("seed", range(3))
def test_bases_agree_and_no_sample_is_lost_whatever_happens(seed: int, frozen: bool, fragments: int) -> None:
    with memory_folder() as folder:
        world = GradientWorld(folder, seed=seed, fragments=fragments, frozen=frozen)
        try:
            world.play(250)
            world.finish()
            if frozen:
                assert {fragment.aggregator.phase for fragment in world.hub.fragments} == {"frozen"}
        finally:
            world.hub.close()

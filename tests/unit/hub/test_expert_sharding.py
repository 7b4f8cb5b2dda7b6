"""Experts at shards: what they count reaches the hub, and the hub's answer is in the entries that shards make."""

import random

from expert_world import ExpertWorld
from ledger_frames import memory_folder
from shard_world import ShardWorld


class ShardedExperts(ExpertWorld, ShardWorld):
    """Both."""


def test_shards_stretch_the_fragments_whose_experts_get_few_tokens_and_a_move_keeps_it() -> None:
    with memory_folder() as folder:
        world = ShardedExperts(folder, nodes=3, fragments=4, codec="int8", total=300, max_staleness=3)
        world.is_prompt = True
        world.agree()
        try:
            world.train(20, random.Random(0), lost=0.0)
            world.agree()
            ledger = world.hub.ledger
            assert set(ledger.sharding.owners) == {1, 2, 3}
            assert ledger.stretches() == [1, 1, 1, 4]
            loads = ledger.shards().fragments
            assert [load.experts for load in loads] == ["", "experts 4-5", "experts 2-3", "experts 0-1"]
            assert [load.stretch for load in loads] == [1, 1, 1, 4]
            assert loads[0].access_share is None
            assert loads[3].access_share == 0.0
            assert loads[1].access_share > loads[2].access_share > 0
            to = "s1" if ledger.sharding.owners[3][0] == "s2" else "s2"
            world.move(3, to)
            world.agree()
            assert ledger.sharding.owners[3][0] == to
            assert ledger.stretches() == [1, 1, 1, 4]
            version = world.hub.fragments[3].version
            world.train(12, random.Random(1), lost=0.0)
            store = world.hub.fragments[3].store
            assert store.version > version
            assert store.entry(store.version).header.stretch == 4
            world.drain()
            world.check()
        finally:
            world.hub.close()

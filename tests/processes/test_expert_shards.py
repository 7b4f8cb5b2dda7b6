"""A mixture of experts in fragments by expert, served by shards: what few tokens reach is pushed less often."""

import json
from pathlib import Path

from cluster import wait_for
from shard_cluster import ShardCluster
from training_jobs import each_once, ends, hurry, script_job

from ciuic.net.shard_messages import FragmentLoad

SAMPLES = 2_400
BY_EXPERT = {"fragments": 6, "fragment_by": "expert", "interval": 3}


def test_fragments_of_starved_experts_are_pushed_less_often_and_the_load_is_evened_out_by_it(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with ShardCluster(tmp_path) as cluster:
        cluster.add_shards("s1")
        cluster.add_nodes("a", "b")
        options = ("--batch", 4, "--step-s", 0.15)
        job = script_job(records, *options, nodes=2, samples=SAMPLES, program="train_experts.py", sync=BY_EXPERT)
        run = cluster.submit(job)
        loads = wait_for(lambda: _stretched(cluster, run), "4 intervals for the experts without tokens")
        hot = [f for f in loads if f.experts and f.access_share]
        cold = [f for f in loads if f.experts and not f.access_share]
        assert sum(f.access_share or 0.0 for f in hot) > 0.99
        assert all(f.stretch == 4 for f in cold)
        assert max(f.stretch for f in hot) == 1
        assert {f.shard for f in loads if f.experts} == {"s1"}
        assert loads[0].shard == ""

        cluster.add_shards("s2")
        wait_for(lambda: any(place.name == "s2" for place in cluster.places(run).places), "the new shard")
        before = {f.fragment: cluster.info(run).versions[f.fragment] for f in (*hot, *cold)}
        wait_for(lambda: min(cluster.info(run).versions[f.fragment] - before[f.fragment] for f in cold) > 3, "rounds")
        made = {f: version - before[f] for f, version in enumerate(cluster.info(run).versions) if f in before}
        assert max(made[f.fragment] for f in cold) < 0.7 * min(made[f.fragment] for f in hot)
        text = cluster.command("hub", "shards", run)
        assert "pushed every 4 intervals" in text
        assert "of accesses)" in text
        planned = cluster.rebalance(run)
        moves = dict(planned.moves)
        assert moves
        assert set(moves.values()) == {"s2"}
        after = {place.name: place.bytes_per_s for place in planned.planned}
        assert after["s1"] < {place.name: place.bytes_per_s for place in planned.places}["s1"]
        wait_for(lambda: all(cluster.owners(run)[f] == "s2" for f in moves), "the moves")
        assert json.loads(cluster.command("hub", "shards", run, "--json"))["fragments"][-1]["experts"]
        hurry(records)
        info = cluster.finished(run)
        assert info.loss_consistent
        assert info.samples.duplicated == 0
        assert each_once(records, SAMPLES)
        assert len({end["digest"] for end in ends(records)}) == 1


def _stretched(cluster: ShardCluster, run: str) -> list[FragmentLoad]:
    if not cluster.owners(run):
        return []
    loads = cluster.places(run).fragments
    is_known = all(f.access_share is not None for f in loads if f.experts)
    return loads if is_known and sorted(f.stretch for f in loads)[-2:] == [4, 4] else []

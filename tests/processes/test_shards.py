"""Runs whose ledger is served by shards: placed, killed, moved while training; nothing is lost, all bases are equal."""

from pathlib import Path

import pytest
from cluster import wait_for
from shard_cluster import ShardCluster
from training_jobs import each_once, hurry, script_job

from ciuic.errors import CertificateError, MovedError, RoleError
from ciuic.net.client import HubClient

SLOWLY = ("--batch", 4, "--step-s", 0.05, "--hold")
SAMPLES = 3_000
FOUR = {"fragments": 4}


def test_shard_and_hub_killed_in_the_middle_of_a_run_lose_no_entry(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with ShardCluster(tmp_path) as cluster:
        s1, s2 = cluster.add_shards("s1", "s2")
        cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=SAMPLES, sync=FOUR))
        cluster.await_version(run, 3)
        owners = cluster.owners(run)
        assert owners[0] == ""
        assert set(owners[1:]) == {"s1", "s2"}
        wait_for(lambda: min(cluster.info(run).versions) >= 3, "entries of every fragment")
        pids = [node.worker_pid() for node in cluster.nodes.values()]

        _nobody_else_is_served(cluster, s1.url, run)

        s1.process.kill()
        before = cluster.info(run).versions
        cluster.await_version(run, before[0] + 3)  # nodes go on training meanwhile
        s1.start()
        wait_for(lambda: min(cluster.info(run).versions) > max(before), "entries of every fragment again")

        cluster.hub.kill()
        s2.process.kill()
        s2.start()
        cluster.start_hub()
        newest = max(cluster.info(run).versions)
        wait_for(lambda: min(cluster.info(run).versions) > newest, "entries after the hub's death")
        assert [node.worker_pid() for node in cluster.nodes.values()] == pids, "no worker was started again"
        assert cluster.owners(run) == owners
        hurry(records)
        info = cluster.finished(run)
        assert info.loss_consistent
        assert info.samples.duplicated == 0
        assert each_once(records, SAMPLES)
        merged = {node.node_id: (node.pushes_accepted, node.pushes_merged) for node in info.nodes}
        assert all(accepted == made for accepted, made in merged.values())


def _nobody_else_is_served(cluster: ShardCluster, url: str, run: str) -> None:
    """A shard takes pushes from nodes with the hub's certificates, and gives files only to shards."""
    folder = cluster.home / "operator"
    authority, path = (folder / "authority.pem").read_bytes(), f"/v1/runs/{run}"
    nobody = HubClient(url, authority, None, None, "control")
    with pytest.raises(CertificateError):
        nobody.fetch(f"{path}/entries?fragment=1&after=0")
    operator = HubClient(url, authority, folder / "operator.pem", folder / "operator.key", "control")
    with pytest.raises(RoleError):
        operator.fetch(f"{path}/entries?fragment=1&after=0")
    own = cluster.nodes["a"].folder
    node = HubClient(url, authority, own / "node.pem", own / "node.key", "control")
    assert node.fetch(f"{path}/entries?fragment=1&after=0")
    with pytest.raises(RoleError):
        node.fetch(f"{path}/files?fragment=1")
    with pytest.raises(MovedError):
        node.fetch(f"{path}/entries?fragment=0&after=0")
    for client in (nobody, operator, node):
        client.close()


def test_fragments_move_to_shards_that_join_while_nodes_train(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with ShardCluster(tmp_path) as cluster:
        cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=SAMPLES, sync=FOUR))
        _entries_of_all(cluster, run, after=2)
        assert cluster.owners(run) == [""] * 4
        (s1,) = cluster.add_shards("s1")
        first = _rebalanced(cluster, run, "s1")
        assert all(cluster.owners(run)[f] == "s1" for f in first)
        assert len(s1.folders(run)) == len(first)
        (s2,) = cluster.add_shards("s2")
        wait_for(lambda: any(place.name == "s2" for place in cluster.places(run).places), "the new shard")
        assert "after the moves:" in cluster.command("hub", "shards", run)
        second = _rebalanced(cluster, run, "s2")
        assert all(cluster.owners(run)[f] == "s2" for f in second)
        wait_for(lambda: len(s1.folders(run)) == len(first - second), "the old owner drops its files")
        s2.process.kill()
        s2.start(reached_at="127.0.0.2")  # it is somewhere else now, under the same name
        assert len(cluster.events("shard.renewed")) == 1
        _entries_of_all(cluster, run, after=max(cluster.info(run).versions))
        hurry(records)
        info = cluster.finished(run)
        assert info.loss_consistent
        assert info.samples.duplicated == 0
        assert each_once(records, SAMPLES)


def _entries_of_all(cluster: ShardCluster, run: str, *, after: int) -> None:
    wait_for(lambda: min(cluster.info(run).versions, default=0) > after, f"entries of all fragments after {after}")


def _rebalanced(cluster: ShardCluster, run: str, newcomer: str) -> set[int]:
    """Even the load out; the fragments that are at the newcomer then, and training goes on there."""
    wait_for(lambda: any(place.name == newcomer for place in cluster.places(run).places), newcomer)
    planned = cluster.rebalance(run)
    moves = dict(planned.moves)
    assert set(moves.values()) == {newcomer}
    before = {place.name: place.bytes_per_s for place in planned.places}
    after = {place.name: place.bytes_per_s for place in planned.planned}
    assert before[newcomer] == 0 < after[newcomer]
    wait_for(lambda: all(cluster.owners(run)[f] == newcomer for f in moves), f"fragments {sorted(moves)} there")
    _entries_of_all(cluster, run, after=max(cluster.info(run).versions))
    return set(moves)

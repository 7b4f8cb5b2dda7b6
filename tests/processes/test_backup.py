"""A hub whose disk is lost comes back from a backup made while it worked, or from a node's copy of the ledger."""

import json
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Cluster, wait_for
from support.cli_world import Done, program, program_environment
from training_jobs import hurry, script_job, trained

from ciuic.hub.keeping.backup import ALLOWED, KIND
from ciuic.ledger.archive import read_archive

SLOWLY = ("--batch", 4, "--step-s", 0.05)
TOTAL = 4_000


def operator(home: Path, *arguments: str) -> Done:
    done = program(*arguments, environment=program_environment(CIUIC_HOME=str(home)))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def forget_operator(cluster: Cluster) -> None:
    """The next start has made another certificate for the operator."""
    cluster.operator.close()
    cluster._operator = None


def lose_disk(cluster: Cluster) -> None:
    """The hub dies and everything it kept is gone; only the address by which nodes reach it is remembered."""
    address = (cluster.home / "hub" / "address").read_text()
    cluster.hub.kill()
    shutil.rmtree(cluster.home)
    (cluster.home / "hub").mkdir(parents=True)
    (cluster.home / "hub" / "address").write_text(address)


def test_a_hub_restored_from_a_backup_made_while_a_run_trained_brings_it_to_its_end(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        records, file = cluster.folder / "records", cluster.folder / "monday.tar.zst"
        cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=TOTAL))
        cluster.await_version(run, 6)
        made = operator(cluster.home, "hub", "backup", str(file))
        assert "SECRET" in made.stderr
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        about = read_archive(file, KIND, ALLOWED)
        assert about.facts["runs"] == [{"run_id": run, "state": "running"}]
        ahead = cluster.await_version(run, cluster.version(run) + 6)  # the nodes leave the copy behind

        address = (cluster.home / "hub" / "address").read_text()
        cluster.hub.kill()
        shutil.rmtree(cluster.home)
        done = json.loads(operator(cluster.folder, "hub", "restore", str(file), str(cluster.home), "--json").stdout)
        restored = done["runs"][0]
        assert 6 <= restored["versions"][0] < ahead
        (cluster.home / "hub" / "address").write_text(address)
        cluster.start_hub()
        forget_operator(cluster)
        wait_for(
            lambda: {n.incarnation > 1000 for n in cluster.info(run).nodes} == {True}, "workers of the restored hub"
        )
        cluster.await_version(run, restored["versions"][0] + 3)
        hurry(records)
        info = cluster.finished(run)
        assert info.samples.duplicated == 0
        assert info.samples.committed == TOTAL
        assert len(trained(records)) == TOTAL  # every one at least once; some again, because the copy did not hold them
        kinds = [event.kind for event in cluster.events()]
        assert kinds.index("hub.restored") < len(kinds) - 1 - kinds[::-1].index("hub.started")
        story = operator(cluster.home, "events", "--run", run).stdout
        print(story)
        assert "restored from a backup" in story


def test_a_run_of_a_hub_that_lost_everything_is_rebuilt_from_a_nodes_copy_and_ends(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        records, file = cluster.folder / "records", cluster.folder / "copy.tar.zst"
        nodes = cluster.add_nodes("a", "b")
        run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=TOTAL, sync={"outer_momentum": 0.3}))
        reached = cluster.await_version(run, 8)
        lose_disk(cluster)
        exported = json.loads(
            operator(cluster.folder / "node-a", "node", "export-ledger", run, str(file), "--json").stdout
        )
        assert exported["version"] >= reached - 1  # its worker may not have had the last one
        for node in nodes:
            node.kill_everything()

        forget_operator(cluster)
        cluster.start_hub()
        done = json.loads(operator(cluster.home, "hub", "rebuild", str(file), "--json").stdout)
        assert (done["versions"], done["samples_known"], done["node_id"]) == ([exported["version"]], True, "a")
        info = cluster.info(run)
        assert (info.state, info.versions, info.digests) == ("stopped", done["versions"], done["digests"])
        assert 0 < info.samples.committed == done["committed"]
        assert any("momentum" in sentence for sentence in done["lost"])
        again = program("hub", "rebuild", str(file), environment=program_environment(CIUIC_HOME=str(cluster.home)))
        assert "has a run tiny-1 already" in again.stderr

        for node in nodes:
            node.start(CIUIC_TOKEN=cluster.token())
        operator(cluster.home, "resume", run)
        hurry(records)
        info = cluster.finished(run)
        assert info.samples.duplicated == 0
        assert info.versions[0] > exported["version"]
        assert len(trained(records)) == TOTAL
        assert [event.kind for event in cluster.events("run.rebuilt")] == ["run.rebuilt"]


@pytest.mark.lab
def test_a_hub_whose_disk_is_full_says_so_loses_nothing_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "hub-home" / "hub"
    disk.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "ciuic", str(disk)], check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        with Cluster(tmp_path) as cluster:
            records = tmp_path / "records"
            nodes = cluster.add_nodes("a", "b")
            run = cluster.submit(script_job(records, *SLOWLY, nodes=2, samples=TOTAL))
            cluster.await_version(run, 4)
            ballast = disk / "ballast"
            with ballast.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
            # the other may have pushed for this round while there was space, and wait for the first
            wait_for(lambda: any("sending a push" in n.run_log(run) for n in nodes), "a refused push")
            refused = cluster.version(run)
            assert any("No space left on device" in n.run_log(run) for n in nodes)
            ballast.unlink()
            cluster.await_version(run, refused + 3)
            hurry(records)
            info = cluster.finished(run)
            assert info.samples.duplicated == 0
            assert {node.incarnation for node in info.nodes} == {1}
            kinds = [event.kind for event in cluster.events()]
            assert kinds.index("storage.failed") < kinds.index("storage.back")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)

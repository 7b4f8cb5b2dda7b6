"""Backup, restore, gc and rm against a real hub: who may, what is refused, what is left."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_process import HubProcess
from support.cli_world import Done, program, program_environment

from ciuic.errors import CiuicError


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("keeping") / "home") as made:
        yield made


def run_cli(hub: HubProcess, *arguments: str, home: Path | None = None) -> Done:
    return program(*arguments, environment=program_environment(CIUIC_HOME=str(home or hub.home)))


def test_a_removed_run_is_gone_with_its_files_and_its_number_is_not_used_again(hub: HubProcess) -> None:
    run = hub.submit({"name": "short"})
    refused = run_cli(hub, "hub", "rm", run)
    assert (refused.returncode, "next: ciuic hub rm short-1 --yes" in refused.stderr) == (2, True)
    is_open = run_cli(hub, "hub", "rm", run, "--yes")
    assert (is_open.returncode, "stop it first" in is_open.stderr) == (5, True)
    assert run_cli(hub, "stop", run).returncode == 0
    folder = hub.home / "hub" / "runs" / run
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "something").write_bytes(bytes(2000))
    done = run_cli(hub, "hub", "rm", run, "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "short-1 is removed; 2.0 kB freed\n"
    assert not folder.exists()
    assert "there is no run" in run_cli(hub, "status", run).stderr
    assert hub.submit({"name": "short"}) == "short-2"
    assert [event.kind for event in hub.events() if event.run_id == run][-1] == "run.removed"


def test_only_an_operator_gets_a_backup_and_it_is_in_the_audit_log(hub: HubProcess, tmp_path: Path) -> None:
    node = hub.join("us-west")
    for path in ("/v1/backup", "/v1/backup?authority=0"):
        with pytest.raises(CiuicError) as caught:
            node.client.fetch(path)
        assert caught.value.code == "CIUIC-203"
    file = tmp_path / "monday.tar.zst"
    done = run_cli(hub, "hub", "backup", str(file))
    assert done.returncode == 0, done.stderr
    assert f"SECRET: {file} holds the authority's key" in done.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "hub.backup" in run_cli(hub, "hub", "audit").stdout
    again = run_cli(hub, "hub", "backup", str(file))
    assert (again.returncode, "nothing is overwritten" in again.stderr) == (2, True)
    assert [path.name for path in (hub.home / "hub").iterdir() if path.name.startswith(".")] == []


def test_a_restored_hub_knows_its_nodes_by_their_certificates(hub: HubProcess, tmp_path: Path) -> None:
    node = hub.join("eu-central")
    node.beat()
    file, home = tmp_path / "file", tmp_path / "home"
    assert run_cli(hub, "hub", "backup", str(file)).returncode == 0
    done = run_cli(hub, "hub", "restore", str(file), str(home))
    assert done.returncode == 0, done.stderr
    assert "what happened after" in done.stderr
    assert run_cli(hub, "hub", "restore", str(file), str(home)).returncode == 2  # not empty any more
    with HubProcess(home) as other:
        node.hub = other
        reply = node.connect().call("GET", "/health", None, dict)
        assert reply["ok"]
        client = node.connect()
        assert node.beat(client=client).epoch > 1000
        client.close()
        assert [event.kind for event in other.events()][-3:].count("hub.restored") == 1


def test_a_hub_that_does_not_run_is_copied_from_its_folder(hub: HubProcess, tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as other:
        other.submit({"name": "x"})
        running = run_cli(other, "hub", "backup", str(tmp_path / "a"), "--offline")
        assert "another hub is running" in running.stderr
    away = run_cli(other, "hub", "backup", str(tmp_path / "a"))
    assert (away.returncode, "say --offline" in away.stderr) == (4, True)
    done = run_cli(other, "hub", "backup", str(tmp_path / "a"), "--offline", "--without-authority", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"] == [{"run_id": "x-1", "state": "waiting"}]
    assert run_cli(other, "hub", "restore", str(tmp_path / "a"), str(tmp_path / "new")).returncode == 0
    assert not list((tmp_path / "new" / "hub").glob("authority*"))


def test_status_shows_what_the_hub_takes_on_the_disk_and_gc_what_it_forgot(hub: HubProcess) -> None:
    assert "used: database " in run_cli(hub, "hub", "status").stdout
    assert run_cli(hub, "hub", "gc").stdout == "forgotten: 0 events, 0 log lines; 0 B freed\n"


def test_a_file_that_is_no_copy_of_a_ledger_is_refused_by_its_name(hub: HubProcess, tmp_path: Path) -> None:
    assert run_cli(hub, "hub", "backup", str(tmp_path / "b")).returncode == 0
    refused = run_cli(hub, "hub", "rebuild", str(tmp_path / "b"))
    assert refused.returncode == 5
    assert "this is not a copy of a ledger" in refused.stderr
    (tmp_path / "empty").touch()
    assert run_cli(hub, "hub", "rebuild", str(tmp_path / "empty")).returncode == 2
    assert "keep a copy of tiny-1" in run_cli(hub, "node", "export-ledger", "tiny-1", str(tmp_path / "c")).stderr

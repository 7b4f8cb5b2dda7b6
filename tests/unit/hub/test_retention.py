"""What a hub forgets, and what it never does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rounds_world import RUN, Make, Rounds, many_rounds

from ciuic.errors import LedgerDamagedError
from ciuic.hub.keeping.retention import DAY_S, DiskMeter, Keep, collect, remove, thin
from ciuic.hub.keeping.store import Store, Wanted
from ciuic.hub.membership.records import Announce, Run
from ciuic.ledger.entry import base_digest, snapshot_from_frame
from ciuic.net.messages import LogLine

NOW = 1000 * DAY_S


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "ciuic.db", events_kept=5)
    yield made
    made.close()


def note(store: Store, run_id: str, state: str, days_ago: float, rounds: Rounds | None = None) -> Run:
    number = len(store.runs()) + 1
    job = rounds.job.to_dict() if rounds else {}
    ended = NOW - days_ago * DAY_S if state == "finished" else None
    run = Run(run_id=run_id, number=number, name=run_id, job=job, state=state, ended_at=ended)  # type: ignore[arg-type]
    lines = [Announce(kind="test", text=f"{run_id} {n}", run_id=run_id) for n in range(3)]
    store.commit(wall_s=NOW - days_ago * DAY_S, runs=[run], lines=lines)
    store.add_lines(run_id, "n0", [LogLine(time=NOW - days_ago * DAY_S, rank=0, stream="out", text="x")])
    store.save_info(run_id, b'{"epoch": 1}')
    return run


def finished(make: Make) -> Rounds:
    rounds = make(samples=30)
    rounds.settled("n0")
    while rounds.lease("n0", 5).status == "granted":
        rounds.push("n0", *rounds.ledger.members["n0"].last_lease.ranges)
    return rounds


def test_nothing_of_an_open_run_is_forgotten_however_old(store: Store, tmp_path: Path) -> None:
    for state in ("waiting", "running", "stopping", "finished", "failed"):
        note(store, state, state, days_ago=400)
    done = collect(tmp_path, store, Keep(), NOW)
    assert (done.events, done.log_lines) == (6, 2)
    left = {event.run_id for event in store.events_after(0)}
    assert left == {"waiting", "running", "stopping"}
    assert all(store.lines_after(run, 0) for run in left)


def test_what_is_younger_stays(store: Store, tmp_path: Path) -> None:
    note(store, "r", "finished", days_ago=40)
    done = collect(tmp_path, store, Keep(events_s=41 * DAY_S, logs_s=39 * DAY_S), NOW)
    assert (done.events, done.log_lines) == (0, 1)


def test_the_cap_on_events_leaves_open_runs_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ciuic.hub.keeping.store.PRUNE_EVERY", 1)
    note(store, "open", "running", days_ago=1)
    for n in range(20):
        store.commit(wall_s=NOW, lines=[Announce(kind="node.joined", text=str(n))])
    assert [event.text for event in store.events_after(0, wanted=Wanted(run_id="open"))] == [
        "open 0",
        "open 1",
        "open 2",
    ]
    assert len(store.events_after(0)) == 3 + 5


def test_of_an_old_finished_run_the_last_snapshot_stays_at_its_last_version(
    make: Make, store: Store, tmp_path: Path
) -> None:
    rounds = finished(make)
    note(store, RUN, "finished", days_ago=31, rounds=rounds)
    version, digest = rounds.version, rounds.ledger.fragments[0].digest
    rounds.ledger.close()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / RUN).symlink_to(rounds.folder)
    assert collect(tmp_path, store, Keep(ledgers_s=32 * DAY_S), NOW).ledgers == []
    done = collect(tmp_path, store, Keep(), NOW)
    assert done.ledgers == [RUN]
    files = sorted(path.name for path in (rounds.folder / "fragment-0").rglob("*") if path.is_file())
    assert files == [f"{version:010d}.base"]
    count = rounds.layout.fragment_shape(0).element_count
    base = snapshot_from_frame((rounds.folder / "fragment-0" / "snapshots" / files[0]).read_bytes(), count)
    assert base_digest(base.vectors["base"], base.header.counters) == digest
    assert collect(tmp_path, store, Keep(), NOW).ledgers == []


def test_a_damaged_ledger_is_left_as_it_is(make: Make, store: Store) -> None:
    rounds = finished(make)
    run = note(store, RUN, "finished", days_ago=31, rounds=rounds)
    rounds.ledger.close()
    log = rounds.folder / "fragment-0" / "log.bin"
    data = bytearray(log.read_bytes())
    data[100] ^= 1
    log.write_bytes(data)
    before = sorted(path.name for path in rounds.folder.rglob("*"))
    with pytest.raises(LedgerDamagedError):
        thin(rounds.folder, run)
    assert sorted(path.name for path in rounds.folder.rglob("*")) == before


def test_a_removed_run_leaves_nothing_but_its_events_and_its_number(store: Store, tmp_path: Path) -> None:
    run = note(store, "r", "finished", days_ago=1)
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "log").write_bytes(bytes(500))
    assert DiskMeter(tmp_path).use().runs == {"r": 500}
    assert remove(tmp_path, "r") == 500
    store.remove_run(run, Announce(kind="run.removed", text="gone", run_id="r"), NOW)
    assert (store.runs(), store.last_number()) == ([], 1)
    assert [event.kind for event in store.events_after(0)] == ["test", "test", "test", "run.removed"]
    assert not list((tmp_path / "runs").iterdir())

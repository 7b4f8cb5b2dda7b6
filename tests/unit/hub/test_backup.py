"""A copy of a ledger taken while it works, what comes back from it, and what a node's copy brings back."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from rounds_world import RUN, Make, Rounds, many_rounds

from ciuic.errors import ConflictError, LedgerDamagedError, SupersededError, UsageError
from ciuic.hub.api.keeping import BackupResponse
from ciuic.hub.keeping.backup import KIND, capture
from ciuic.hub.keeping.rebuild import read_copy, write_ledger
from ciuic.hub.keeping.restore import FENCE, restore
from ciuic.hub.keeping.store import Store
from ciuic.hub.membership.records import Announce, Node, Run
from ciuic.ledger.archive import archive_pieces, write_archive
from ciuic.ledger.copy import KIND as COPY
from ciuic.ledger.copy import CopyAbout, FragmentCopy, base_path, export_items
from ciuic.net.tls import Authority


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub's folder with its authority and a database that names the run."""
    folder = tmp_path / "home" / "hub"
    folder.mkdir(parents=True)
    Authority.create(folder)
    return folder


def note_run(hub: Path, rounds: Rounds, state: str = "running") -> None:
    store = Store(hub / "ciuic.db")
    run = Run(run_id=RUN, number=7, name="r", job=rounds.job.to_dict(), state=state)  # type: ignore[arg-type]
    node = Node(node_id="n0", serial="1", number=1, location="n0", run_id=RUN, revision=5)
    store.commit(wall_s=1.0, runs=[run], nodes=[node], epoch=3, lines=[Announce(kind="test", text="before")])
    store.close()
    (hub / "runs").mkdir()
    (hub / "runs" / RUN).symlink_to(rounds.folder)


def restored(home: Path, rounds: Rounds) -> Rounds:
    """The restored ledger in the hands of the same test world."""
    again = Rounds(home / "hub" / "runs" / RUN, samples=None)
    again.ledger.close()
    again.job, again.layout = rounds.job, rounds.layout
    again.ledger = again._open()
    return again


def test_a_restored_ledger_is_as_it_was_and_refuses_the_workers_of_the_lost_one(
    make: Make, hub: Path, tmp_path: Path
) -> None:
    rounds = make(samples=200)
    rounds.settled("n0", "n1")
    for _ in range(3):
        rounds.train("n0")
        rounds.train("n1")
    rounds.train("n0")  # accepted, waits for its round
    held = rounds.lease("n1", 5).ranges
    note_run(hub, rounds)
    found = capture(hub)
    version, digest, counts = rounds.version, rounds.ledger.fragments[0].digest, rounds.counts()
    for _ in range(3):  # the run goes on while the copy is read
        rounds.train("n1")
        rounds.train("n0")
    assert rounds.version > version
    write_archive(tmp_path / "file", found.pieces())
    assert not list(hub.glob(".backup-*"))

    done = restore(tmp_path / "file", tmp_path / "new")
    (run,) = done.runs
    assert found.facts["elsewhere"] == {}
    assert (run.versions, run.digests, run.committed) == ([version], [digest], counts.committed)
    again = restored(tmp_path / "new", rounds)
    assert again.ledger.fragments[0].digest == digest
    assert again.counts() == msgspec.structs.replace(counts, leased=again.counts().leased)
    assert again.counts().lost == 0
    again.incarnations, again.sequences, again.request_ids = rounds.incarnations, rounds.sequences, rounds.request_ids
    with pytest.raises(SupersededError):
        again.train("n1")
    with pytest.raises(ConflictError, match="the hub has version"):
        again.ledger.entries_after(0, rounds.version, 100)
    again.tick(60)
    assert again.version == version + 1, "what was acknowledged merges"
    again.incarnations.clear()
    assert again.attach("n1").incarnation == 1 + FENCE + 1
    assert again.lease("n1", 5).ranges == held
    again.ledger.close()


def test_a_restored_hub_gives_out_no_number_again(make: Make, hub: Path, tmp_path: Path) -> None:
    rounds = make(samples=20)
    rounds.start("n0")
    note_run(hub, rounds)
    write_archive(tmp_path / "file", capture(hub).pieces())
    restore(tmp_path / "file", tmp_path / "new")
    store = Store(tmp_path / "new" / "hub" / "ciuic.db")
    assert store.epoch() == 3 + FENCE
    assert store.last_number() == 7 + FENCE
    assert [run.attempt for run in store.runs()] == [1 + FENCE]
    assert [node.revision for node in store.nodes()] == [5 + FENCE]
    assert [(event.id > FENCE, event.kind) for event in store.events_after(0)] == [
        (False, "test"),
        (True, "hub.restored"),
    ]
    store.close()


def test_a_backup_without_the_authority_does_not_hold_its_key(make: Make, hub: Path, tmp_path: Path) -> None:
    rounds = make(samples=20)
    note_run(hub, rounds)
    write_archive(tmp_path / "file", capture(hub, with_authority=False).pieces())
    done = restore(tmp_path / "file", tmp_path / "new")
    assert not done.with_authority
    assert not list((tmp_path / "new" / "hub").glob("authority*"))


@pytest.mark.parametrize("after", ["before it began", "while a piece is read"])
def test_a_caller_that_goes_away_leaves_no_second_names(
    make: Make, hub: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    note_run(hub, make(samples=20))
    found, reads, go_on = capture(hub), threading.Event(), threading.Event()

    def pieces() -> Iterator[bytes]:
        reads.set()
        go_on.wait(30)
        yield b"piece"

    monkeypatch.setattr(found, "pieces", pieces)

    async def receive() -> dict[str, str]:
        if after == "while a piece is read":
            await asyncio.to_thread(reads.wait, 30)
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        if after == "before it began":
            raise OSError("gone")

    with ThreadPoolExecutor(1) as pool:
        response = BackupResponse(found, pool)
        with suppress(OSError):
            asyncio.run(response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send))
        go_on.set()
    assert not list(hub.glob(".backup-*"))


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(UsageError, match="not empty"):
        restore(tmp_path / "file", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_backup_whose_snapshot_was_changed_is_not_restored(make: Make, hub: Path, tmp_path: Path) -> None:
    rounds = make(samples=200)
    rounds.settled("n0")
    rounds.train("n0")
    note_run(hub, rounds)
    found = capture(hub)
    for snapshot in found.staging.rglob("*.base"):
        data = bytearray(snapshot.read_bytes())
        data[-100] ^= 1
        snapshot.unlink()  # the hub's own file has another name
        snapshot.write_bytes(data)
    write_archive(tmp_path / "file", archive_pieces(KIND, found.facts, found.items))
    with pytest.raises(LedgerDamagedError, match="no good snapshot"):
        restore(tmp_path / "file", tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


# ---- from a node's copy


def node_copy(rounds: Rounds, folder: Path, *, begins: int = 0) -> Path:
    """What a node would have on its disk that joined at a version of which there is a snapshot."""
    about = CopyAbout(
        run_id=RUN,
        node_id="n0",
        job=rounds.job.to_dict(),
        layout=msgspec.to_builtins(rounds.layout),
        total_samples=rounds.counts().total,
    )
    for number, fragment in enumerate(rounds.ledger.fragments):
        copy = FragmentCopy(folder / f"fragment-{number}", rounds.layout, number)
        base = fragment.snapshot_path(begins).read_bytes() if begins else rounds.version_0(number)
        base_path(copy.folder, begins).write_bytes(base)
        copy.begin(begins)
        copy.append(fragment.entries_after(begins, 1 << 30))
        copy.close()
    (folder / "copy.json").write_bytes(msgspec.json.encode(about))
    return folder


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_rebuilt_run_has_the_copys_version_digest_and_samples_and_goes_on(
    make: Make, tmp_path: Path, fragments: int, momentum: float
) -> None:
    rounds = make(samples=200, fragments=fragments, outer_momentum=momentum)
    rounds.settled("n0", "n1")
    for _ in range(4):
        rounds.train("n0")
        rounds.train("n1")
    folder = node_copy(rounds, tmp_path / "copy")
    write_archive(tmp_path / "file", archive_pieces(COPY, {}, export_items(folder)))
    copy = read_copy(tmp_path / "file", tmp_path / "scratch", 1 << 30)
    done = write_ledger(copy, tmp_path / "run")
    assert done.versions == [f.version for f in rounds.ledger.fragments]
    assert done.digests == [f.digest for f in rounds.ledger.fragments]
    assert (done.committed, done.samples_known) == (rounds.counts().committed, True)
    assert any("momentum" in sentence for sentence in done.lost) == bool(momentum)

    again = Rounds(tmp_path / "run", samples=None, fragments=fragments)
    again.ledger.close()
    again.job = rounds.job
    again.ledger = again._open()
    assert again.counts().committed == rounds.counts().committed
    assert again.counts().lost == 0
    assert list(again.ledger.samples.committed) == list(rounds.ledger.samples.committed)
    assert again.attach("n0").incarnation > FENCE
    version = again.version
    again.train("n0")
    assert again.version == version + 1
    with pytest.raises(ConflictError, match="no entries before version"):
        again.ledger.entries_after(0, version - 1, 100)
    digest = again.ledger.fragments[0].digest
    again.restart()
    assert (again.version, again.ledger.fragments[0].digest) == (version + 1, digest)
    again.ledger.close()


def test_a_copy_that_does_not_know_what_was_committed_says_so(make: Make, tmp_path: Path) -> None:
    rounds = make(samples=400)
    rounds.settled("n0")
    while rounds.ledger.fragments[0].store.snapshot_versions()[-1] == 0:
        rounds.train("n0")
    begins = rounds.ledger.fragments[0].store.snapshot_versions()[-1]
    rounds.train("n0")
    folder = node_copy(rounds, tmp_path / "copy", begins=begins)
    write_archive(tmp_path / "file", archive_pieces(COPY, {}, export_items(folder)))
    done = write_ledger(read_copy(tmp_path / "file", tmp_path / "scratch", 1 << 30), tmp_path / "run")
    assert (done.committed, done.samples_known) == (0, False)
    assert done.digests == [rounds.ledger.fragments[0].digest]
    assert "all are trained again" in done.lost[-1]


def test_a_copy_with_a_changed_entry_is_refused(make: Make, tmp_path: Path) -> None:
    rounds = make(samples=200)
    rounds.settled("n0")
    rounds.train("n0")
    rounds.train("n0")
    folder = node_copy(rounds, tmp_path / "copy")
    log = next(folder.rglob("*.log"))
    data = bytearray(log.read_bytes())
    data[len(data) // 3] ^= 1
    log.write_bytes(data)
    write_archive(tmp_path / "file", archive_pieces(COPY, {}, export_items(folder)))
    with pytest.raises(LedgerDamagedError):
        read_copy(tmp_path / "file", tmp_path / "scratch", 1 << 30)
    assert not (tmp_path / "scratch").exists()

"""A worker's copy of the ledger: what comes goes to the disk, and trouble there never reaches the training."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from rounds_world import RUN, Make, Rounds, many_rounds

from ciuic.errors import StorageError, UnreachableError
from ciuic.ledger import copy as copies
from ciuic.ledger.copy import Committed, CopyAbout, load_copy, newest_copy, newest_version
from ciuic.train.ledger_copy import LedgerRecorder


@pytest.fixture
def rounds() -> Iterator[Rounds]:
    with many_rounds() as make:
        yield started(make)


def started(make: Make) -> Rounds:
    rounds = make(samples=2000)
    rounds.settled("n0")
    return rounds


def recorder(root: Path, rounds: Rounds, ask: Callable[[], Committed] | None = None) -> LedgerRecorder:
    about = CopyAbout(
        run_id=RUN, node_id="n0", job=rounds.job.to_dict(), layout=msgspec.to_builtins(rounds.layout), total_samples=0
    )
    return LedgerRecorder(root, about, rounds.layout, ask or rounds.ledger.committed)


def feed(copy: LedgerRecorder, rounds: Rounds, after: int) -> int:
    frames = rounds.ledger.entries_after(0, after, 1 << 30)
    for frame in frames:
        copy.entry(0, memoryview(frame))
    return after + len(frames)


def begin(copy: LedgerRecorder, rounds: Rounds) -> None:
    from ciuic.ledger.entry import snapshot_from_frame

    count = rounds.layout.fragment_shape(0).element_count
    copy.began(0, snapshot_from_frame(rounds.version_0(), count).vectors["base"], (0,))


def download(copy: LedgerRecorder, rounds: Rounds, folder: Path) -> int:
    version = rounds.ledger.fragments[0].snapshot_version
    file = folder / "download"
    shutil.copy(rounds.ledger.snapshot_path(0, version), file)
    copy.loaded(0, version, file)
    assert not file.exists()
    return version


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_copy_of_a_worker_from_the_start_is_the_hubs_ledger(rounds: Rounds, tmp_path: Path) -> None:
    copy = recorder(tmp_path, rounds)
    begin(copy, rounds)
    copy.caught_up(2000)
    version = 0
    for _ in range(40):  # many times the size of the base
        rounds.train("n0")
        version = feed(copy, rounds, version)
    copy.close()
    found = load_copy(newest_copy(tmp_path))
    fragment = rounds.ledger.fragments[0]
    assert (found.snapshots[0].header.version, found.snapshots[0].header.digest) == (fragment.version, fragment.digest)
    assert found.committed is not None
    assert found.committed.ranges == list(rounds.ledger.samples.committed)
    assert found.committed.total == 2000
    assert len(list(tmp_path.rglob("*.base"))) == 1
    assert next(tmp_path.rglob("*.base")).name != "0000000000.base", "the entries were replayed into a new base"
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert used < 3 * 4 * rounds.layout.fragment_shape(0).element_count + 20_000


def test_the_copy_of_a_joiner_asks_the_hub_what_was_committed_before(rounds: Rounds, tmp_path: Path) -> None:
    for _ in range(12):
        rounds.train("n0")
    asked: list[int] = []

    def ask() -> Committed:
        asked.append(len(asked))
        if len(asked) == 1:
            raise UnreachableError("the hub does not answer")
        rounds.train("n0")  # the hub is ahead of what has come here
        return rounds.ledger.committed()

    copy = recorder(tmp_path, rounds, ask)
    copy.folder.mkdir(exist_ok=True)
    version = feed(copy, rounds, download(copy, rounds, tmp_path))
    copy.caught_up(2000)
    until(lambda: len(asked) == 2)
    version = feed(copy, rounds, version)
    rounds.train("n0")
    feed(copy, rounds, version)
    until(lambda: (copy.folder / copies.SAMPLES).exists())
    copy.close()
    found = load_copy(newest_copy(tmp_path))
    assert found.committed is not None
    assert found.committed.version == rounds.version
    assert found.committed.ranges == list(rounds.ledger.samples.committed)
    assert found.committed.incarnations == {"n0": 1}


def test_a_copy_that_is_ahead_of_the_hub_stays_until_the_new_one_has_come_as_far(
    rounds: Rounds, tmp_path: Path
) -> None:
    for _ in range(12):
        rounds.train("n0")
    first = recorder(tmp_path, rounds)
    begin(first, rounds)
    feed(first, rounds, 0)
    first.caught_up(2000)
    first.close()
    ahead = newest_version(first.folder)
    second = recorder(tmp_path, rounds)  # of a hub that was restored from an older copy
    begin(second, rounds)
    second.caught_up(2000)
    until(lambda: (second.folder / copies.ABOUT).exists())
    assert newest_copy(tmp_path) == second.folder
    assert newest_version(first.folder) == ahead
    second.close()
    third = recorder(tmp_path, rounds)
    begin(third, rounds)
    feed(third, rounds, 0)
    third.caught_up(2000)
    third.close()
    assert [path.name for path in tmp_path.iterdir()] == [third.folder.name]


def test_a_full_disk_is_waited_for_and_nothing_is_missing_afterwards(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ciuic.train.ledger_copy.AGAIN_S", 0.01)
    is_full, met = threading.Event(), threading.Event()
    real = copies.FragmentCopy.append

    def append(self: copies.FragmentCopy, frames: list[bytes]) -> None:
        if is_full.is_set():
            met.set()
            raise StorageError("cannot append", cause="No space left on device")
        real(self, frames)

    monkeypatch.setattr(copies.FragmentCopy, "append", append)
    copy = recorder(tmp_path, rounds)
    begin(copy, rounds)
    copy.caught_up(2000)
    version = feed(copy, rounds, 0)
    is_full.set()
    for _ in range(5):
        rounds.train("n0")
        version = feed(copy, rounds, version)  # never blocks, never raises
    assert met.wait(30)
    is_full.clear()
    until(lambda: newest_version(copy.folder) == version)
    copy.close()
    assert "cannot be written" in caplog.text
    assert load_copy(copy.folder).snapshots[0].header.digest == rounds.ledger.fragments[0].digest


def test_a_copy_that_cannot_keep_up_ends_where_it_is(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy = recorder(tmp_path, rounds)
    begin(copy, rounds)
    copy.caught_up(2000)
    version = feed(copy, rounds, 0)
    until(lambda: newest_version(copy.folder) == version)
    monkeypatch.setattr("ciuic.train.ledger_copy.QUEUE_BYTES", 10)
    go_on, real = threading.Event(), copies.FragmentCopy.append

    def append(self: copies.FragmentCopy, frames: list[bytes]) -> None:
        go_on.wait(30)
        real(self, frames)

    monkeypatch.setattr(copies.FragmentCopy, "append", append)
    for _ in range(4):
        rounds.train("n0")
        feed(copy, rounds, rounds.version - 1)
    assert f"ends at version {version}" in caplog.text
    go_on.set()
    copy.close()
    assert version <= load_copy(copy.folder).snapshots[0].header.version < rounds.version
    assert copy._queue.qsize() <= 1, "what nobody writes any more takes no memory"


def test_an_entry_larger_than_what_may_wait_is_kept(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ciuic.train.ledger_copy.QUEUE_BYTES", 10)
    copy = recorder(tmp_path, rounds)
    begin(copy, rounds)
    copy.caught_up(2000)
    version = 0
    for _ in range(3):
        rounds.train("n0")
        version = feed(copy, rounds, version)
        until(lambda version=version: newest_version(copy.folder) == version)
    assert version >= 3
    copy.close()

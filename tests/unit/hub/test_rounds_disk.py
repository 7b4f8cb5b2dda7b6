"""A hub whose disk is full says so, loses nothing, and goes on when there is space again."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_cases import run_case
from rounds_world import Make, many_rounds

from ciuic.errors import StorageError
from ciuic.net import messages as m


@pytest.fixture
def make() -> Iterator[Make]:
    with many_rounds() as made:
        yield made


class Disk:
    """The system finds out that the disk is full when a file is to be synced."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.full_for = ""
        real = os.fsync

        def fsync(descriptor: int) -> None:
            name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
            if self.full_for and self.full_for in name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        patch.setattr(os, "fsync", fsync)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to tell files apart")
    return Disk(monkeypatch)


PUSHES, LOG, JOURNAL, SNAPSHOTS = ".1.", "log.bin", "journal.bin", ".hub"


def test_a_push_that_cannot_be_stored_is_not_accepted_and_the_same_one_is_later(make: Make, disk: Disk) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    frame = rounds.frame("n0", *rounds.lease("n0", 5).ranges)
    before = rounds.counts()
    disk.full_for = PUSHES
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot write") as caught:
            rounds.ledger.push("n0", frame)
        assert "work goes on when there is space again" in caught.value.next
    assert rounds.counts() == before
    assert not rounds.ledger.fragments[0].inbox.waiting
    disk.full_for = ""
    rounds.restart()
    assert rounds.ledger.push("n0", frame).status == "accepted"
    assert rounds.train("n1").status == "accepted"
    assert rounds.version == 2


def test_a_round_that_cannot_be_stored_stays_open_is_told_once_and_closes_later(make: Make, disk: Disk) -> None:
    rounds = make()
    rounds.settled("n0", "n1")
    digest = rounds.ledger.fragments[0].aggregator.digest
    rounds.train("n0")
    disk.full_for = LOG
    assert rounds.train("n1").status == "accepted"
    for _ in range(3):
        rounds.tick(6)
    assert rounds.version == 1
    assert rounds.ledger.fragments[0].aggregator.digest == digest
    assert rounds.kinds().count("storage.failed") == 1
    assert "round not closed" in rounds.events[-1][1]
    rounds.restart()  # with the disk still full: nothing is written to open it
    disk.full_for = ""
    rounds.tick()
    assert rounds.version == 2
    assert rounds.counts().committed == 14


def test_a_lease_that_cannot_be_noted_is_not_given_and_no_sample_is_lost(make: Make, disk: Disk) -> None:
    rounds = make(samples=10)
    rounds.start("n0", "n1")
    disk.full_for = JOURNAL
    for _ in range(5):
        with pytest.raises(StorageError):
            rounds.lease("n0", 4, request_id=1)
    disk.full_for = ""
    assert rounds.lease("n0", 4, request_id=1).ranges == [(0, 4)]
    assert rounds.lease("n1", 10).ranges == [(4, 10)]
    assert rounds.counts().lost == 0


def test_a_worker_that_cannot_be_noted_asks_again(make: Make, disk: Disk) -> None:
    rounds = make(samples=10)
    rounds.start("n0")
    rounds.lease("n0", 4)
    disk.full_for = JOURNAL
    with pytest.raises(StorageError):
        rounds.attach("n0")
    disk.full_for = ""
    assert rounds.attach("n0").incarnation == 2
    assert rounds.lease("n0", 4).ranges == [(0, 4)]
    rounds.restart()
    assert rounds.counts().lost == 0
    assert rounds.lease("n0", 4, request_id=1).ranges == [(0, 4)]


@pytest.mark.parametrize("restart", [False, True])
def test_rounds_go_on_without_a_node_whose_death_cannot_be_noted(make: Make, disk: Disk, restart: bool) -> None:
    rounds = make(samples=20)
    rounds.settled("n0", "n1")
    held = rounds.lease("n1", 5).ranges
    rounds.train("n0", 5)
    assert rounds.version == 1
    disk.full_for = JOURNAL
    assert rounds.ledger.node_gone("n1") == 5
    disk.full_for = ""
    assert rounds.version == 2, "the round does not wait for it"
    assert rounds.member("n1").state == "gone"
    assert rounds.kinds().count("storage.failed") == 1
    if restart:
        rounds.restart()
        assert rounds.ledger.node_gone("n1") == 5  # found out again
    assert rounds.lease("n0", 5).ranges == held
    assert rounds.counts().lost == 0


def test_a_snapshot_that_cannot_be_written_delays_nothing(make: Make, disk: Disk) -> None:
    rounds = make(samples=200)
    rounds.start("n0")
    disk.full_for = SNAPSHOTS
    for number in range(8):
        rounds.train("n0", 5)
        assert rounds.version == number + 1
    assert "snapshot not written" in next(text for kind, text, _ in rounds.events if kind == "storage.failed")
    assert rounds.ledger.fragments[0].store.snapshot_versions() == [0]
    digest = rounds.ledger.fragments[0].aggregator.digest
    rounds.restart()
    assert rounds.ledger.fragments[0].aggregator.digest == digest
    disk.full_for = ""
    rounds.train("n0", 5)
    assert rounds.ledger.fragments[0].store.snapshot_versions() == [0, 9]


def test_the_first_attachment_may_come_again_when_the_layout_could_not_be_stored(make: Make, disk: Disk) -> None:
    rounds = make()
    disk.full_for = "layout.json"
    with pytest.raises(StorageError):
        rounds.attach("n0")
    disk.full_for = ""
    assert rounds.attach("n0").state == "initialize"
    disk.full_for = "0000000000"
    with pytest.raises(StorageError):
        rounds.upload("n0")
    assert rounds.attach("n0").state == "initialize"
    disk.full_for = ""
    rounds.upload("n0")
    assert rounds.attach("n0").state == "ready"


def test_a_worker_that_left_is_gone_also_when_that_cannot_be_noted(make: Make, disk: Disk) -> None:
    rounds = make(samples=10)
    rounds.start("n0", "n1")
    rounds.lease("n0", 10)
    disk.full_for = JOURNAL
    rounds.ledger.detach("n0", m.DetachRequest(incarnation=1, reason="drained"))
    disk.full_for = ""
    assert rounds.lease("n1", 10).ranges == [(0, 10)]


def test_a_hub_on_a_disk_that_is_really_full_goes_on_when_there_is_space() -> None:
    run_case("disk_is_full_for_a_hub")

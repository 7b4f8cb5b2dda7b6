"""The files of a fragment, and that a restart brings back exactly what was there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from codec_cases import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_frames import RUN, aggregator, memory_folder, push_of

from ciuic.codec import CODEC_NAMES
from ciuic.errors import LedgerDamagedError, StorageError
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import Entry, Push, entry_from_frame, snapshot_from_frame
from ciuic.ledger.replay import Rebuilt, rebuild
from ciuic.ledger.store import FragmentStore


class Fragment:
    """A hub's fragment that writes everything it does, as RunLedger does it."""

    def __init__(self, folder: Path, codec: str = "int4", momentum: float = 0.9) -> None:
        self.folder, self.codec, self.momentum = folder, codec, momentum
        self.hub = self._machine()
        self.store = self._open()
        self.store.save_snapshot(self.hub.snapshot(RUN))
        self.sequence = 0

    def _machine(self) -> Aggregator:
        return aggregator(self.codec, lr=0.7, momentum=self.momentum)

    def _open(self) -> FragmentStore:
        return FragmentStore(self.folder, self.hub.element_count)

    def push(self, node: str = "n0") -> Push:
        """An accepted push."""
        self.sequence += 1
        push = push_of(node=node, sequence=self.sequence, codec=self.codec, base_version=self.hub.version)
        self.store.save_push(push.key, push.to_frame())
        return push

    def round(self, *nodes: str) -> None:
        pushes = [self.push(node) for node in nodes or ("n0", "n1")]
        candidate = self.hub.close(pushes, (), Facts(run=RUN, epoch=self.sequence, why="complete", time=1.5))
        self.store.append(candidate.entry)
        self.hub.commit(candidate)

    def snapshot(self) -> None:
        self.store.save_snapshot(self.hub.snapshot(RUN))

    def state(self) -> list[Any]:
        outer = self.hub.outer_state.momentum
        momentum = None if outer is None else outer.tobytes()
        hub = self.hub
        return [hub.version, hub.digest, hub.counters, hub.base.tobytes(), hub.residual.tobytes(), momentum]

    def restart(self) -> Rebuilt:
        """Only the files remain."""
        self.store.close()
        self.hub = self._machine()
        self.store = self._open()
        return rebuild(self.hub, self.store, RUN)


@pytest.fixture
def fragment(tmp_path: Path) -> Iterator[Fragment]:
    made = Fragment(tmp_path / "fragment-0")
    yield made
    made.store.close()


# ---- entries, pushes, snapshots


def test_entries_are_read_as_they_were_written(fragment: Fragment) -> None:
    for _ in range(3):
        fragment.round()
    store = fragment.store
    assert store.version == 3
    assert [store.entry(v).header.version for v in (1, 2, 3)] == [1, 2, 3]
    frames = store.entries_after(0, 1 << 30)
    assert [entry_from_frame(f).header.version for f in frames] == [1, 2, 3]
    sizes = [len(f) for f in frames]
    assert store.entry_bytes_total == sum(sizes)
    assert store.bytes_since(1) == sum(sizes[1:])
    assert store.bytes_since(3) == 0


def test_a_reply_holds_at_least_one_entry_and_then_no_more_than_its_limit(fragment: Fragment) -> None:
    for _ in range(4):
        fragment.round()
    one = len(fragment.store.log.read(0))
    for limit, count in ((0, 1), (1, 1), (one, 1), (3 * one - 1, 2), (10 * one, 4)):
        assert len(fragment.store.entries_after(0, limit)) == count
    assert [entry_from_frame(f).header.version for f in fragment.store.entries_after(2, 1 << 30)] == [3, 4]
    assert fragment.store.entries_after(4, 1 << 30) == []


def test_two_snapshots_are_kept_and_pushes_only_as_long_as_they_are_needed(fragment: Fragment) -> None:
    assert fragment.store.snapshot_versions() == [0]
    fragment.round()
    fragment.round()
    fragment.snapshot()
    assert fragment.store.snapshot_versions() == [0, 2]
    assert len(fragment.store.push_keys()) == 4, "version 0 needs them if version 2 turns out to be damaged"
    fragment.round()
    waits = fragment.push("n5")
    fragment.snapshot()
    assert fragment.store.snapshot_versions() == [2, 3]
    assert [key[2] for key in fragment.store.push_keys()] == [5, 6, 7]
    fragment.round()
    fragment.snapshot()
    assert fragment.store.snapshot_versions() == [3, 4]
    assert sorted(key[2] for key in fragment.store.push_keys()) == [7, 8, 9]
    assert waits.key in fragment.store.push_keys()
    assert len(list((fragment.folder / "snapshots").iterdir())) == 4


def test_a_node_name_may_hold_dots_and_dashes(fragment: Fragment) -> None:
    push = fragment.push("eu-central.2.1")
    assert fragment.store.push_keys() == [push.key]
    assert fragment.store.load_push(push.key).header == push.header


def test_what_nodes_download_is_the_base_alone(fragment: Fragment) -> None:
    fragment.round()
    fragment.snapshot()
    frame = fragment.store.snapshot_path(1).read_bytes()
    snapshot = snapshot_from_frame(frame, fragment.hub.element_count)
    assert snapshot.header.parts == ("base",)
    assert same_bits(snapshot.vectors["base"].copy(), fragment.hub.base)
    whole = fragment.store.load_snapshot(1)
    assert whole.header.parts == ("base", "residual", "momentum")


# ---- restart


@settings(max_examples=40)
@given(
    codec=st.sampled_from(CODEC_NAMES),
    momentum=st.sampled_from([0.0, 0.9]),
    events=st.lists(st.sampled_from(["round", "round", "snapshot", "push", "restart"]), max_size=10),
)
def test_a_restart_brings_back_every_bit(codec: str, momentum: float, events: list[str]) -> None:
    with memory_folder() as folder:
        restart_often(Fragment(folder, codec, momentum), events)


def restart_often(fragment: Fragment, events: list[str]) -> None:
    waiting: list[Push] = []
    for event in [*events, "restart"]:
        match event:
            case "round":
                fragment.round("n0", "n1")
            case "snapshot":
                fragment.snapshot()
            case "push":
                waiting.append(fragment.push("n2"))
            case _:
                before = fragment.state()
                rebuilt = fragment.restart()
                assert fragment.state() == before
                assert [p.key for p in rebuilt.inbox] == sorted(p.key for p in waiting)
                assert [header.version for header in rebuilt.merged] == list(range(1, fragment.hub.version + 1))
                assert rebuilt.snapshot_version == max(fragment.store.snapshot_versions())
    fragment.store.close()


def test_leftovers_of_a_crash_are_removed_when_the_files_are_opened(fragment: Fragment) -> None:
    for _ in range(2):
        fragment.round()
        fragment.snapshot()
    old = {key: fragment.store.push_path(key).read_bytes() for key in fragment.store.push_keys()}
    fragment.round()
    fragment.snapshot()
    snapshots, pushes = fragment.folder / "snapshots", fragment.folder / "pushes"
    wanted = {path.name for folder in (snapshots, pushes) for path in folder.iterdir()}
    for key, data in old.items():  # killed before they were dropped
        fragment.store.push_path(key).write_bytes(data)
    (snapshots / "0000000009.hub").write_bytes(b"its base was never written")
    (snapshots / ".0000000010.base.tmp").write_bytes(b"half")
    (snapshots / "0000000000.hub").write_bytes(b"its base is gone")
    (pushes / ".n0.1.77.tmp").write_bytes(b"half")
    before = fragment.state()
    fragment.restart()
    assert fragment.state() == before
    assert {path.name for folder in (snapshots, pushes) for path in folder.iterdir()} == wanted


# ---- damage


def damage(path: Path, place: int = -20) -> bytes:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    return bytes(data)


@pytest.mark.parametrize("how", ["missing", "flipped", "cut", "another"])
def test_an_accepted_push_that_is_missing_or_damaged_is_named(fragment: Fragment, how: str) -> None:
    fragment.round()
    fragment.round()
    path = fragment.store.push_path(("n1", 1, 4))
    match how:
        case "missing":
            path.unlink()
        case "flipped":
            damage(path)
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case _:
            path.write_bytes(fragment.store.push_path(("n1", 1, 2)).read_bytes())
    with pytest.raises(LedgerDamagedError) as caught:
        fragment.restart()
    assert caught.value.code == "CIUIC-501"
    if how == "another":
        assert "does not come out of its pushes again" in caught.value.message
    else:
        assert "n1.1.4" in caught.value.message
    assert "backup" in caught.value.next


@pytest.mark.parametrize(
    "changes", [{"digest": "0" * 32}, {"counters": (9, 9)}, {"outer_lr": 0.5}, {"codec": "int8"}], ids=str
)
def test_an_entry_that_says_something_else_than_its_pushes_give_is_damage(
    fragment: Fragment, changes: dict[str, Any]
) -> None:
    fragment.round()
    fragment.round()
    last = fragment.store.entry(2)
    forged = Entry(header=msgspec.structs.replace(last.header, **changes), payload=last.payload)
    log = fragment.folder / "log.bin"
    log.write_bytes(fragment.store.entries_after(0, 0)[0] + forged.to_frame())
    with pytest.raises(LedgerDamagedError, match="entry 2 does not come out of its pushes again"):
        fragment.restart()


@pytest.mark.parametrize("which", ["base", "hub", "base missing", "hub missing"])
def test_a_damaged_newest_snapshot_falls_back_to_the_older_one(fragment: Fragment, which: str) -> None:
    fragment.round()
    fragment.snapshot()
    fragment.round()
    fragment.round()
    fragment.snapshot()
    fragment.round()
    suffix, _, missing = which.partition(" ")
    path = fragment.store.snapshot_path(3).with_suffix(f".{suffix}")
    if missing:
        path.unlink()
    else:
        damage(path)
    before = fragment.state()
    assert fragment.restart().snapshot_version == 1
    assert fragment.state() == before
    fragment.snapshot()  # goes on, and the next snapshot finds no file in its way
    assert fragment.restart().snapshot_version == 4


def test_no_good_snapshot_at_all_is_an_error_that_says_what_is_wrong_with_each(fragment: Fragment) -> None:
    fragment.round()
    fragment.snapshot()
    damage(fragment.store.snapshot_path(0))
    damage(fragment.store.snapshot_path(1))
    with pytest.raises(LedgerDamagedError, match="there is no good snapshot") as caught:
        fragment.restart()
    assert "1: the checksum of the snapshot is wrong; 0: the checksum" in caught.value.cause


def test_a_snapshot_that_does_not_fit_the_log_is_not_used(fragment: Fragment, tmp_path: Path) -> None:
    other = Fragment(tmp_path / "other")
    for f in (fragment, other):
        f.round()
        f.sequence += 100 if f is other else 0
        f.round()
        f.snapshot()
    other.store.close()
    for kind in ("base", "hub"):
        path = fragment.store.snapshot_path(2).with_suffix(f".{kind}")
        path.write_bytes(other.store.snapshot_path(2).with_suffix(f".{kind}").read_bytes())
    with pytest.raises(LedgerDamagedError, match="version 2 does not fit the log"):
        fragment.restart()


def test_a_log_that_lost_its_end_behind_a_snapshot_falls_back_to_the_snapshot_it_covers(fragment: Fragment) -> None:
    fragment.round()
    after_one = fragment.state()
    fragment.round()
    fragment.snapshot()
    log = fragment.folder / "log.bin"
    log.write_bytes(log.read_bytes()[:-1])
    rebuilt = fragment.restart()
    assert rebuilt.snapshot_version == 0
    assert fragment.state() == after_one
    assert [p.key for p in rebuilt.inbox] == [("n0", 1, 3), ("n1", 1, 4)], "the pushes wait for their round again"


def test_entries_that_do_not_follow_each_other_are_damage(fragment: Fragment) -> None:
    for _ in range(3):
        fragment.round()
    frames = fragment.store.entries_after(0, 1 << 30)
    (fragment.folder / "log.bin").write_bytes(frames[0] + frames[2])
    with pytest.raises(LedgerDamagedError, match="entry 3 does not follow entry 1"):
        fragment.restart()


def test_the_two_files_of_a_snapshot_must_belong_together(fragment: Fragment) -> None:
    fragment.round()
    fragment.snapshot()
    first = fragment.store.snapshot_path(0).with_suffix(".hub").read_bytes()
    fragment.store.snapshot_path(1).with_suffix(".hub").write_bytes(first)
    with pytest.raises(LedgerDamagedError, match="do not belong together"):
        fragment.store.load_snapshot(1)
    before = fragment.state()
    assert fragment.restart().snapshot_version == 0
    assert fragment.state() == before


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot create"):
        FragmentStore(tmp_path / "file" / "fragment-0", 5)


def test_state_is_compared_bit_for_bit_here(fragment: Fragment) -> None:
    before = fragment.state()
    fragment.hub.residual.view(np.uint32)[3] ^= np.uint32(1)
    assert fragment.state() != before


class Moved:
    """A spooled file that can, or cannot, become a push's."""

    def __init__(self, source: Path, *, works: bool) -> None:
        self.source, self.works = source, works

    def keep_as(self, path: Path) -> bool:
        if self.works:
            self.source.replace(path)
        return self.works


@pytest.mark.parametrize("works", [True, False])
def test_a_push_is_the_spooled_file_or_written_when_that_cannot_be(tmp_path: Path, works: bool) -> None:
    store = FragmentStore(tmp_path / "fragment", 8)
    source = tmp_path / "spooled"
    source.write_bytes(b"the push")
    inode = source.stat().st_ino
    store.save_push(("us", 1, 1), b"the push", Moved(source, works=works))
    path = store.push_path(("us", 1, 1))
    assert path.read_bytes() == b"the push"
    assert (path.stat().st_ino == inode) == works
    assert store.push_keys() == [("us", 1, 1)]
    store.close()

"""Uploads on disk: any order, duplicates, wrong chunks, what is abandoned, what an earlier process left."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic.errors import ConflictError, FrameError
from ciuic.hub.api import spool as spool_module
from ciuic.hub.api.spool import FULL_BODIES, Spool, Upload
from ciuic.net.chunks import ChunksReply, Manifest, manifest_of

KEY = ("run-1", "us")
SIZE = 8192
LIMIT = 1 << 20


def small_manifest(body: bytes, fragment: int = 0) -> Manifest:
    whole = [manifest_of(body[at : at + SIZE], "push", 0).digests for at in range(0, len(body), SIZE)]
    return Manifest(what="push", fragment=fragment, total_bytes=len(body), chunk_bytes=SIZE, digests=b"".join(whole))


def part(body: bytes, manifest: Manifest, index: int) -> bytes:
    start, stop = manifest.span(index)
    return body[start:stop]


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 6 * SIZE + 1))
def test_chunks_in_any_order_and_often_make_the_body(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int
) -> None:
    body = os.urandom(size)
    manifest = small_manifest(body)
    spool = Spool(tmp_path_factory.mktemp("spool"))
    upload = spool.open(KEY, manifest, LIMIT)
    order = data.draw(st.permutations(list(range(manifest.count)) * 2))
    left = set(range(manifest.count))
    for index in order:
        assert upload.is_whole == (not left)
        upload.store(index, part(body, manifest, index))
        left.discard(index)
        assert {i for start, stop in upload.missing() for i in range(start, stop)} == left
    assert upload.read() == body
    spool.close()


def test_a_wrong_chunk_is_refused_and_stays_missing(tmp_path: Path) -> None:
    body = os.urandom(3 * SIZE)
    manifest = small_manifest(body)
    upload = Spool(tmp_path).open(KEY, manifest, LIMIT)
    with pytest.raises(FrameError, match="chunk 1 "):
        upload.store(1, part(body, manifest, 2))
    assert upload.missing() == [(0, 3)]
    upload.end()


def test_an_abandoned_upload_expires_with_its_file(tmp_path: Path) -> None:
    clock = Clock()
    spool = Spool(tmp_path, clock=clock, idle_s=60.0)
    upload = spool.open(KEY, small_manifest(os.urandom(SIZE)), LIMIT)
    clock.now_s += 61
    assert spool.sweep() == 1, "a request is still at it"
    spool.leave(upload)
    assert spool.sweep() == 1
    clock.now_s += 61
    assert spool.sweep() == 0
    assert not upload.path.exists()


def test_files_of_an_earlier_process_expire_too(tmp_path: Path) -> None:
    old = tmp_path / "run-0" / "us.abc"
    old.parent.mkdir()
    old.write_bytes(b"x")
    os.utime(old, (0, 0))
    Spool(tmp_path, idle_s=60.0).sweep()
    assert not old.exists()


def test_what_an_earlier_process_has_written_is_taken_up_and_damage_is_seen(tmp_path: Path) -> None:
    body = os.urandom(4 * SIZE)
    manifest = small_manifest(body)
    first = Spool(tmp_path)
    upload = first.open(KEY, manifest, LIMIT)
    for index in (0, 2, 3):
        upload.store(index, part(body, manifest, index))
    first.close()
    with upload.path.open("r+b") as file:
        file.seek(3 * SIZE)
        file.write(b"damage")
    again = Spool(tmp_path).open(KEY, manifest, LIMIT)
    assert again.missing() == [(1, 2), (3, 4)]
    again.end()


def test_an_upload_that_was_taken_keeps_its_answer_and_no_file(tmp_path: Path) -> None:
    spool, manifest = Spool(tmp_path), small_manifest(os.urandom(SIZE))
    upload = spool.open(KEY, manifest, LIMIT)
    upload.finish(ChunksReply(done=True))
    assert spool.open(KEY, manifest, LIMIT).result == ChunksReply(done=True)
    assert not upload.path.exists()


def test_older_uploads_of_a_node_give_way_but_not_those_at_work_or_of_others(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    other = spool.open(("run-1", "eu"), small_manifest(os.urandom(SIZE)), SIZE)
    idle = spool.open(KEY, small_manifest(os.urandom(SIZE)), SIZE)
    spool.leave(idle)
    busy: list[Upload] = [spool.open(KEY, small_manifest(os.urandom(SIZE)), SIZE) for _ in range(FULL_BODIES)]
    assert not idle.path.exists()
    with pytest.raises(ConflictError, match="too many"):
        spool.open(KEY, small_manifest(os.urandom(SIZE)), SIZE)
    assert all(upload.path.exists() for upload in [other, *busy])
    spool.close()


def test_a_file_stays_open_for_those_who_are_at_it_when_another_request_ends_the_upload(tmp_path: Path) -> None:
    body = os.urandom(2 * SIZE)
    manifest, spool = small_manifest(body), Spool(tmp_path)
    for end in (lambda upload: upload.finish(ChunksReply(done=True)), spool.drop):
        first, second = spool.open(KEY, manifest, LIMIT), spool.open(KEY, manifest, LIMIT)
        assert first is second
        first.store(0, part(body, manifest, 0))
        end(first)
        spool.leave(first)
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # would get the number of a closed file
        second.store(1, part(body, manifest, 1))
        assert second.read() == body
        for number in others:
            os.close(number)
        open_before = len(os.listdir("/proc/self/fd"))
        spool.leave(second)
        assert len(os.listdir("/proc/self/fd")) == open_before - 1, "and is closed when the last one leaves"
        assert not second.path.exists()
        spool.drop(second)


def test_an_upload_that_is_dropped_late_does_not_take_a_newer_one_of_the_same_content_along(tmp_path: Path) -> None:
    manifest, spool = small_manifest(os.urandom(SIZE)), Spool(tmp_path)
    old = spool.open(KEY, manifest, LIMIT)
    spool.drop(old)
    new = spool.open(KEY, manifest, LIMIT)
    spool.drop(old)
    spool.leave(old)
    assert new is not old
    assert new.path.exists()
    assert len(spool) == 1


def test_taking_up_a_large_file_keeps_nobody_else_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = os.urandom(SIZE)
    manifest, reads, go_on = small_manifest(body), threading.Event(), threading.Event()
    Spool(tmp_path).open(KEY, manifest, LIMIT)

    def slow(upload: Upload) -> None:
        reads.set()
        go_on.wait(60)

    monkeypatch.setattr(Upload, "_take_up", slow)
    spool = Spool(tmp_path)
    reader = threading.Thread(target=spool.open, args=(KEY, manifest, LIMIT))
    reader.start()
    assert reads.wait(60)
    other = threading.Thread(target=lambda: spool.leave(spool.open(("run-1", "eu"), manifest, LIMIT)))
    other.start()
    other.join(30)
    assert not other.is_alive()
    go_on.set()
    reader.join(60)


def whole(spool: Spool, body: bytes) -> Upload:
    manifest = small_manifest(body)
    upload = spool.open(KEY, manifest, LIMIT)
    for index in range(manifest.count):
        upload.store(index, part(body, manifest, index))
    return upload


def test_a_whole_body_becomes_the_pushs_file_without_being_written_again(tmp_path: Path) -> None:
    body, place = os.urandom(3 * SIZE + 5), tmp_path / "pushes" / "us.1.1"
    place.parent.mkdir()
    spool = Spool(tmp_path / "spool")
    upload = whole(spool, body)
    inode = upload.path.stat().st_ino
    assert upload.keep_as(place)
    assert (place.stat().st_ino, place.read_bytes()) == (inode, body)
    assert not upload.path.exists()
    upload.finish(ChunksReply(done=True))
    spool.leave(upload)
    spool.close()
    assert place.read_bytes() == body, "the end of the upload must not touch the push"


def test_bytes_and_names_are_flushed_in_that_order_before_a_push_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "pushes" / "us.1.1"
    place.parent.mkdir()
    upload = whole(Spool(tmp_path / "spool"), os.urandom(SIZE))
    flushed: list[tuple[str, bool]] = []
    real = os.fsync

    def watched(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), place.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    assert upload.keep_as(place)
    assert flushed == [(str(upload.path), False), (str(place.parent), True)]


def test_a_file_that_cannot_be_moved_or_may_be_lost_is_left_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool")
    upload = whole(spool, os.urandom(SIZE))
    assert not upload.keep_as(tmp_path / "no such folder" / "us.1.1")
    (tmp_path / "pushes").mkdir()
    place = tmp_path / "pushes" / "us.1.1"
    half = spool.open(("run-1", "eu"), small_manifest(os.urandom(2 * SIZE)), LIMIT)
    assert not half.keep_as(place)

    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(spool_module, "FLUSH_BYTES", SIZE)
    monkeypatch.setattr(os, "fdatasync", refuse)
    doubtful = whole(spool, os.urandom(2 * SIZE))
    assert not doubtful.keep_as(place), "the kernel tells of a failed flush only once"
    assert not place.exists()

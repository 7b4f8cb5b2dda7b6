"""Appends are whole or not there; damage that no crash explains is never cut away."""

import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import LedgerDamagedError, StorageError
from ciuic.ledger.files import AppendLog, write_durable
from ciuic.ledger.frame import build_frame

FRAMES = [build_frame("record", b"h" * size, bytes([size]) * size) for size in (0, 7, 40, 1, 200)]
STARTS = [sum(len(f) for f in FRAMES[:i]) for i in range(len(FRAMES))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.bin"


def read(path: Path) -> list[bytes]:
    log = AppendLog(path, "record")
    try:
        return list(log)
    finally:
        log.close()


def test_what_was_appended_is_there_after_opening_again(path: Path) -> None:
    assert read(path) == []
    log = AppendLog(path, "record")
    for number, frame in enumerate(FRAMES):
        assert len(log) == number
        log.append(frame)
        assert log.read(number) == frame
    assert list(log) == FRAMES
    log.close()
    assert read(path) == FRAMES
    assert path.read_bytes() == b"".join(FRAMES)


@pytest.mark.parametrize("last", range(len(FRAMES)))
def test_a_torn_last_append_of_every_length_is_cut_off_and_the_rest_kept(path: Path, last: int) -> None:
    whole = b"".join(FRAMES[:last])
    for length in range(1, len(FRAMES[last])):
        path.write_bytes(whole + FRAMES[last][:length])
        log = AppendLog(path, "record")
        assert list(log) == FRAMES[:last]
        assert log.torn_bytes == length
        log.append(FRAMES[0])
        log.close()
        assert path.read_bytes() == whole + FRAMES[0]


@pytest.mark.parametrize("zeros", [1, 19, 20, 500])
def test_zeros_that_the_disk_never_filled_are_cut_off(path: Path, zeros: int) -> None:
    path.write_bytes(b"".join(FRAMES) + bytes(zeros))
    assert read(path) == FRAMES
    path.write_bytes(b"".join(FRAMES[:-1]) + FRAMES[-1][:30] + bytes(len(FRAMES[-1]) - 30))
    assert read(path) == FRAMES[:-1]


def test_any_flipped_bit_in_the_middle_is_damage_and_the_file_is_not_changed(path: Path) -> None:
    data = b"".join(FRAMES)
    for bit in range(0, 8 * STARTS[-1], 3):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(broken)
        with pytest.raises(LedgerDamagedError, match="damaged at byte") as caught:
            AppendLog(path, "record")
        assert caught.value.code == "CIUIC-501"
        assert str(path) in caught.value.message
        assert path.read_bytes() == broken


@given(start=st.integers(0, STARTS[-1] - 1), length=st.integers(1, 60), fill=st.sampled_from([0, 0xFF]))
def test_a_hole_in_the_middle_is_damage_and_the_file_is_not_changed(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, fill: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "hole.bin"
    broken = bytearray(b"".join(FRAMES))
    stop = min(start + length, STARTS[-1])
    before = bytes(broken)
    broken[start:stop] = bytes([fill]) * (stop - start)
    if bytes(broken) == before:
        return
    path.write_bytes(broken)
    with pytest.raises(LedgerDamagedError):
        AppendLog(path, "record")
    assert path.read_bytes() == broken


def test_a_middle_frame_that_claims_to_go_on_past_the_end_does_not_take_the_rest_with_it(path: Path) -> None:
    broken = bytearray(b"".join(FRAMES))
    struct.pack_into("<Q", broken, STARTS[1] + 12, 1 << 40)
    path.write_bytes(broken)
    with pytest.raises(LedgerDamagedError):
        AppendLog(path, "record")
    assert path.read_bytes() == broken


def test_a_damaged_last_append_is_cut_off_because_a_crash_may_have_left_it(path: Path) -> None:
    for place in range(STARTS[-1] + 20, len(b"".join(FRAMES))):
        broken = bytearray(b"".join(FRAMES))
        broken[place] ^= 1
        path.write_bytes(broken)
        assert read(path) == FRAMES[:-1]


def test_reads_and_writes_that_the_system_cuts_short_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_read, really_write = os.pread, os.write
    monkeypatch.setattr(os, "pread", lambda f, length, offset: really_read(f, min(length, 7), offset))
    monkeypatch.setattr(os, "write", lambda f, data: really_write(f, data[:11]))
    log = AppendLog(path, "record")
    for frame in FRAMES:
        log.append(frame)
    assert list(log) == FRAMES
    log.close()
    assert read(path) == FRAMES


def test_a_file_of_something_else_is_damage_and_is_not_changed(path: Path) -> None:
    for data in (b"dear diary, today I trained a model", build_frame("entry", b"h", b"of another kind")):
        path.write_bytes(data)
        with pytest.raises(LedgerDamagedError):
            AppendLog(path, "record")
        assert path.read_bytes() == data


def test_a_log_that_became_shorter_while_it_is_open_is_damage(path: Path) -> None:
    log = AppendLog(path, "record")
    log.append(FRAMES[2])
    os.truncate(path, 10)
    with pytest.raises(LedgerDamagedError, match="shorter"):
        log.read(0)
    log.close()


def test_a_folder_that_is_not_there_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot open") as caught:
        AppendLog(tmp_path / "missing" / "log.bin", "record")
    assert caught.value.cause == os.strerror(errno.ENOENT)
    with pytest.raises(StorageError, match="cannot write"):
        write_durable(tmp_path / "missing" / "file", b"x")


# ---- replacing a file


def test_a_file_is_replaced_whole_and_a_leftover_of_a_crash_is_in_nobodys_way(tmp_path: Path) -> None:
    target = tmp_path / "state"
    (tmp_path / ".state.tmp").write_bytes(b"half of an older wri")
    for data in (b"first", b"", b"third" * 1000):
        write_durable(target, data)
        assert target.read_bytes() == data
        assert [p.name for p in tmp_path.iterdir()] == ["state"]

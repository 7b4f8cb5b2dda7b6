"""One file with many: what comes out is what went in, and nothing else is believed."""

import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import FrameError, StorageError, UsageError
from ciuic.ledger.archive import Folder, archive_pieces, bytes_item, file_item, read_archive, write_archive

KIND = "test-1"
ALLOWED = re.compile(r"[a-z]+(/[a-z]+)?")


def make(path: Path, files: dict[str, bytes], kind: str = KIND) -> Path:
    write_archive(path, archive_pieces(kind, {"n": 1}, [bytes_item(name, data) for name, data in files.items()]))
    return path


@given(st.dictionaries(st.from_regex(ALLOWED, fullmatch=True), st.binary(max_size=3000), max_size=5))
def test_what_comes_out_is_what_went_in(files: dict[str, bytes]) -> None:
    import tempfile

    names = {name.split("/")[0] for name in files if "/" in name}
    files = {name: data for name, data in files.items() if name not in names}  # no file where a folder must be
    with tempfile.TemporaryDirectory() as folder:
        path, out = make(Path(folder) / "x", files), Path(folder) / "out"
        sink = Folder(out, 1 << 20)
        about = read_archive(path, KIND, ALLOWED, sink)
        sink.close()
        assert about.facts == {"n": 1}
        assert {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()} == files


def test_only_its_owner_may_read_it_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = make(tmp_path / "x", {"a": b"1"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="is there already"):
        make(path, {"a": b"2"})


def test_every_cut_is_seen_and_every_flipped_byte_that_changes_anything(tmp_path: Path) -> None:
    files = {"a": b"hello" * 50, "b": bytes(2000)}
    data = make(tmp_path / "x", files).read_bytes()
    broken = tmp_path / "broken"
    checksum_bytes = 4  # a file that only lacks these has all its content
    for size in range(len(data) - checksum_bytes):
        broken.write_bytes(data[:size])
        with pytest.raises(FrameError, match="not a whole archive"):
            read_archive(broken, KIND, ALLOWED)
    refused = 0
    for place in range(len(data)):
        broken.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        found: dict[str, bytearray] = {}
        try:
            read_archive(broken, KIND, ALLOWED, lambda name, _, into=found: into.setdefault(name, bytearray()).extend)
        except FrameError:
            refused += 1
        else:
            assert found == files, "a byte of the packing that other bytes mean as well"
    assert refused > 0.9 * len(data)


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "x", {"../../evil": b"1"})
    with pytest.raises(FrameError, match="not a whole archive") as caught:
        read_archive(path, KIND, ALLOWED, Folder(tmp_path / "out", 100))
    assert "does not belong there" in caught.value.cause
    assert not (tmp_path / "evil").exists()


def test_another_kind_of_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(FrameError) as caught:
        read_archive(make(tmp_path / "x", {}, kind="other-2"), KIND, ALLOWED)
    assert "other-2" in caught.value.cause


def test_an_archive_that_is_larger_than_the_room_is_refused_before_it_is_written(tmp_path: Path) -> None:
    path = make(tmp_path / "x", {"a": bytes(1_000_000)})
    with pytest.raises(StorageError, match="no room"):
        read_archive(path, KIND, ALLOWED, Folder(tmp_path / "out", 1000))
    assert not list(tmp_path.glob("out/*"))


def test_a_log_that_grows_while_it_is_read_is_taken_as_far_as_it_was(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"12345")
    item = file_item("a", log)
    log.write_bytes(b"1234567")
    write_archive(tmp_path / "x", archive_pieces(KIND, {}, [item]))
    sink = Folder(tmp_path / "out", 100)
    read_archive(tmp_path / "x", KIND, ALLOWED, sink)
    sink.close()
    assert (tmp_path / "out" / "a").read_bytes() == b"12345"


def test_a_file_that_became_shorter_is_an_error_and_leaves_no_archive(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"12345")
    item = file_item("a", log)
    log.write_bytes(b"1")
    with pytest.raises(StorageError, match="shorter"):
        write_archive(tmp_path / "x", archive_pieces(KIND, {}, [item]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log"]

import io
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import DataError, StorageError
from ciuic.train.token_store import TokenSink, build_cached, build_in_memory, cache_folder, token_dtype

U16 = np.dtype(np.uint16)


class Counting:
    """A build that knows how often it ran."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, train: TokenSink, held_out: TokenSink) -> str:
        self.calls += 1
        train.append(np.arange(1000))
        train.append(np.arange(5))
        held_out.append(np.asarray([7]))
        return "digest"


@given(st.lists(st.lists(st.integers(0, 65535), max_size=40), max_size=8))
def test_npy_written_in_pieces_is_read_back_whole(pieces: list[list[int]]) -> None:
    file = io.BytesIO()
    sink = TokenSink(file, U16)
    for piece in pieces:
        sink.append(np.asarray(piece, dtype=np.int64))
    sink.finish()
    file.seek(0)
    assert np.load(file, allow_pickle=False).tolist() == [token for piece in pieces for token in piece]


def test_restart_forgets_what_was_written() -> None:
    file = io.BytesIO()
    sink = TokenSink(file, U16)
    sink.append(np.arange(100))
    sink.restart()
    sink.append(np.arange(3))
    sink.finish()
    file.seek(0)
    assert np.load(file).tolist() == [0, 1, 2]


def test_smallest_type_that_holds_the_vocabulary_is_chosen() -> None:
    assert [token_dtype(size).itemsize for size in (256, 257, 65536, 65537, 129280)] == [1, 2, 2, 4, 4]


def test_memory_and_cache_give_the_same_tokens(tmp_path: Path) -> None:
    memory, cached = build_in_memory(Counting(), U16), build_cached("key", Counting(), U16, tmp_path)
    assert np.array_equal(memory.train, cached.train)
    assert np.array_equal(memory.held_out, cached.held_out)
    assert memory.digest == cached.digest == "digest"
    assert isinstance(cached.train, np.memmap)


def test_second_use_reads_the_cache_and_another_key_does_not(tmp_path: Path) -> None:
    build = Counting()
    build_cached(["a"], build, U16, tmp_path)
    build_cached(["a"], build, U16, tmp_path)
    assert build.calls == 1
    build_cached(["b"], build, U16, tmp_path)
    assert build.calls == 2


def test_empty_part_can_be_cached(tmp_path: Path) -> None:
    def build(train: TokenSink, held_out: TokenSink) -> str:
        train.append(np.arange(3))
        return ""

    assert len(build_cached("key", build, U16, tmp_path).held_out) == 0


@pytest.mark.parametrize("damage", ["truncate", "remove", "garbage"])
def test_damaged_cache_is_built_again(tmp_path: Path, damage: str) -> None:
    build = Counting()
    build_cached("key", build, U16, tmp_path)
    file = next(tmp_path.glob("tokens/*/train.npy"))
    if damage == "truncate":
        os.truncate(file, 500)
    elif damage == "remove":
        file.unlink()
    else:
        (file.parent / "about.json").write_text("{")
    assert len(build_cached("key", build, U16, tmp_path).train) == 1005
    assert build.calls == 2


def test_builders_at_the_same_time_all_get_whole_tokens(tmp_path: Path) -> None:
    barrier, lengths = threading.Barrier(4), []

    def build(train: TokenSink, held_out: TokenSink) -> str:
        barrier.wait(timeout=20)
        return Counting()(train, held_out)

    def one() -> None:
        lengths.append(len(build_cached("key", build, U16, tmp_path).train))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert lengths == [1005] * 4
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def test_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def build(train: TokenSink, held_out: TokenSink) -> str:
        raise DataError("no")

    with pytest.raises(DataError):
        build_cached("key", build, U16, tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="CIUIC_HOME"):
        build_cached("key", Counting(), U16, tmp_path / "file")


def test_cache_is_below_ciuic_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CIUIC_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("CIUIC_HOME")
    assert cache_folder().name == "ciuic"

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import DataError
from ciuic.train.corpus import (
    Document,
    corpus_digest,
    find_files,
    is_held_out,
    stdlib_documents,
    stdlib_files,
    text_documents,
)


def test_corpus_is_large_sorted_and_the_same_twice() -> None:
    documents = list(stdlib_documents())
    keys = [document.key for document in documents]
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert corpus_digest(documents) == corpus_digest()


def test_corpus_leaves_out_what_differs_between_machines() -> None:
    parts = {part for path in stdlib_files() for part in path.parts}
    assert parts.isdisjoint({"test", "tests", "site-packages", "dist-packages", "lib2to3", "__pycache__", "tkinter"})
    assert not any(path.name.startswith(("_sysconfigdata", "sitecustomize")) for path in stdlib_files())


def test_added_site_package_or_cache_does_not_change_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\n" * 200_000)
    before = corpus_digest(stdlib_documents(tmp_path))
    for name in ("site-packages/p.py", "test/t.py", "__pycache__/a.py", "sitecustomize.py", "_sysconfigdata__x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("print()\n")
    assert corpus_digest(stdlib_documents(tmp_path)) == before
    (tmp_path / "b.py").write_text("y = 2\n")
    assert corpus_digest(stdlib_documents(tmp_path)) != before


def test_python_without_sources_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without the sources of its standard library"):
        stdlib_files(tmp_path)


def test_digest_tells_where_one_document_ends() -> None:
    together = [Document(text=b"ab", key=b"k")]
    apart = [Document(text=b"a", key=b"k"), Document(text=b"b", key=b"k")]
    assert corpus_digest(together) != corpus_digest(apart)


@given(key=st.binary(), small=st.floats(0, 1), large=st.floats(0, 1))
def test_held_out_at_a_fraction_is_held_out_at_every_larger_one(key: bytes, small: float, large: float) -> None:
    small, large = sorted((small, large))
    assert is_held_out(key, large) or not is_held_out(key, small)


def test_held_out_part_has_about_the_asked_size() -> None:
    held = sum(is_held_out(str(number).encode(), 0.1) for number in range(5000))
    assert 400 < held < 600
    assert not is_held_out(b"x", 0.0)
    assert is_held_out(b"x", 1.0)


def test_patterns_find_files_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    found = find_files([f"{tmp_path}/**/*.txt", f"{tmp_path}/a.*"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a.txt", "b.txt", "deep/er/c.txt"]


def test_pattern_without_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"none\*"):
        find_files([f"{tmp_path}/a.txt", f"{tmp_path}/none*"])


@given(st.binary(max_size=20_000).map(lambda noise: noise.replace(b"\x00", b"\n\n")))
def test_cutting_a_file_loses_and_adds_nothing(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.txt"
        path.write_bytes(content)
        assert b"".join(document.text for document in text_documents([path])) == content


def test_large_file_is_cut_at_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"paragraph {number} {'words ' * 30}\n\n" for number in range(400)))
    documents = list(text_documents([path]))
    assert len(documents) > 20
    assert all(document.text.endswith(b"\n\n") for document in documents)
    assert all(document.text.startswith(b"paragraph") for document in documents)


def test_file_without_lines_is_still_cut(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_bytes(b"x" * 1_000_000)
    assert max(len(document.text) for document in text_documents([path])) <= 1 << 16


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    path.write_text("text")
    path.unlink()
    with pytest.raises(DataError, match=r"gone\.txt cannot be read; cause: no such file"):
        list(text_documents([path]))

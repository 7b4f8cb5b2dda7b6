"""The last calls of a process that is gone."""

import os
import signal
from pathlib import Path

import pytest

from ciuic.doctor import blackbox
from ciuic.doctor.blackbox import ROW_BYTES, ROWS, BlackBox, path_of, read_and_remove


def _in_a_process(*rows: list[object], close: bool = False) -> int:
    pid = os.fork()
    if not pid:
        box = BlackBox()
        for row in rows:
            box.add(row)
        if close:
            box.close()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    return pid


def test_rows_of_a_killed_process_are_read_once_and_the_file_is_gone():
    pid = _in_a_process(["0", 1, "barrier"], ["0", 2, "all_reduce"])
    assert read_and_remove(pid) == [["0", 1, "barrier"], ["0", 2, "all_reduce"]]
    assert not path_of(pid).exists()
    assert read_and_remove(pid) == []


def test_only_the_last_rows_are_kept_in_order():
    pid = _in_a_process(*([number] for number in range(ROWS + 5)))
    assert read_and_remove(pid) == [[number] for number in range(5, ROWS + 5)]


def test_a_row_that_is_too_long_is_left_out():
    pid = _in_a_process([1], ["x" * ROW_BYTES], [3])
    assert read_and_remove(pid) == [[1], [3]]


def test_a_process_that_ends_by_itself_leaves_nothing():
    pid = _in_a_process([1], close=True)
    assert not path_of(pid).exists()


@pytest.mark.parametrize("kind", ["link", "short", "folder"])
def test_what_is_not_such_a_file_is_not_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blackbox, "path_of", lambda pid: tmp_path / str(pid))
    secret = tmp_path / "secret"
    secret.write_bytes(b"[1, 2]".ljust(blackbox.SIZE, b"\0"))
    path = tmp_path / "7"
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "short":
        path.write_bytes(b"[1, 2]")
    else:
        path.mkdir()
    assert read_and_remove(7) == []
    assert secret.exists()

"""What survives kill -9 and full disks: run as `python kill_cases.py CASE FOLDER`; a failed assertion is the result.

The tests in tests/unit/ledger/test_killed.py and tests/unit/hub/test_rounds_killed.py call it through `run_case`.
"""

import ctypes
import errno
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from examples import is_soak
from kill_hub import hub_is_killed_at_every_write_point
from kill_points import all_received, ended, fork, killed_after
from rounds_world import Rounds

from ciuic.errors import StorageError
from ciuic.ledger.files import AppendLog, write_durable
from ciuic.ledger.frame import build_frame

CANNOT = 77
"""Exit code: this machine does not allow what the case needs."""


def frame(number: int) -> bytes:
    """The n-th frame of a log: its content says which it is, and sizes vary from tiny to many pages."""
    return build_frame("record", number.to_bytes(8, "little"), bytes([number % 256]) * (number * 997 % 20_000))


def contents(log: AppendLog) -> list[bytes]:
    found = list(log)
    log.close()
    return found


# ---- the log


def append_and_say(path: Path, count: int) -> Callable[[Connection], None]:
    def work(say: Connection) -> None:
        log = AppendLog(path, "record")
        for number in range(len(log), len(log) + count):
            log.append(frame(number))
            say.send(number)

    return work


def check_log(path: Path, acknowledged: list[int], before: int) -> int:
    """All that was acknowledged is there, at most one more, nothing else. Returns how many."""
    log = AppendLog(path, "record")
    found = contents(log)
    least = acknowledged[-1] + 1 if acknowledged else before
    assert least <= len(found) <= least + 1, f"{least} acknowledged, {len(found)} found"
    assert found == [frame(number) for number in range(len(found))]
    return len(found)


def log_at_every_write_point(folder: Path) -> None:
    path, count, point = folder / "log.bin", 0, 0
    while True:
        point += 1
        pid, ours = fork(append_and_say(path, 4), bomb=point)
        said = all_received(ours)
        finished = ended(pid) == 0
        count = check_log(path, said, count)
        if finished:
            assert point > 12
            return


def log_at_any_moment(folder: Path) -> None:
    path, count, chance = folder / "log.bin", 0, random.Random(1)
    for _ in range(25):
        pid, ours = fork(append_and_say(path, 10**9))
        killed_after(pid, chance.uniform(0.0, 0.03))
        count = check_log(path, all_received(ours), count)
    assert count > 0


# ---- replacing a file


def state(number: int) -> bytes:
    return number.to_bytes(8, "little") * (1 + number * 131 % 9_000)


def replace_and_say(path: Path, first: int, count: int) -> Callable[[Connection], None]:
    def work(say: Connection) -> None:
        for number in range(first, first + count):
            write_durable(path, state(number))
            say.send(number)

    return work


def check_state(path: Path, acknowledged: list[int], before: int) -> int:
    """The newest acknowledged content or the one after it, whole. Returns which."""
    least = acknowledged[-1] if acknowledged else before
    if least == 0 and not path.exists():
        return 0
    data = path.read_bytes()
    number = int.from_bytes(data[:8], "little")
    assert data == state(number), "neither the old nor the new file"
    assert least <= number <= least + 1
    return number


def file_at_every_write_point(folder: Path) -> None:
    path, number, point = folder / "state", 0, 0
    while True:
        point += 1
        pid, ours = fork(replace_and_say(path, number + 1, 3), bomb=point)
        said = all_received(ours)
        finished = ended(pid) == 0
        number = check_state(path, said, number)
        if finished:
            assert point > 6
            return


def file_at_any_moment(folder: Path) -> None:
    path, number, chance = folder / "state", 0, random.Random(2)
    for _ in range(25):
        pid, ours = fork(replace_and_say(path, number + 1, 10**9))
        killed_after(pid, chance.uniform(0.0, 0.03))
        number = check_state(path, all_received(ours), number)
    assert number > 0


# ---- disks that are full


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of this size, seen by this process only; it goes when the process ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    options = f"size={size_bytes}".encode()
    if libc.mount(b"ciuic", str(folder).encode(), b"tmpfs", 0, options):
        sys.exit(CANNOT)
    try:
        yield folder
    finally:
        libc.umount(str(folder).encode())


def disk_is_full(folder: Path) -> None:
    size = 256 * 1024
    with small_disk(folder / "disk", size) as disk:
        log = AppendLog(disk / "log.bin", "record")
        log.append(frame(1))
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(size // 2))
        big = build_frame("record", b"", bytes(size * 3 // 4))
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot append") as caught:
                log.append(big)
            assert caught.value.cause == os.strerror(errno.ENOSPC)
            assert "nothing that was acknowledged is lost" in caught.value.next
            assert (disk / "log.bin").read_bytes() == frame(1)
            assert list(log) == [frame(1)]
        ballast.unlink()
        log.append(big)
        log.close()
        assert contents(AppendLog(disk / "log.bin", "record")) == [frame(1), big]


def disk_is_full_when_a_file_is_replaced(folder: Path) -> None:
    size = 256 * 1024
    with small_disk(folder / "disk", size) as disk:
        target = disk / "state"
        write_durable(target, b"old")
        with pytest.raises(StorageError, match="cannot write"):
            write_durable(target, bytes(size * 2))
        assert target.read_bytes() == b"old"
        assert [p.name for p in disk.iterdir()] == ["state"]


def fill(ballast: Path) -> None:
    """Write until the disk is full."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def disk_is_full_for_a_hub(folder: Path) -> None:
    size = 512 * 1024
    with small_disk(folder / "disk", size) as disk:
        rounds = Rounds(disk / "run", samples=200)
        rounds.settled("n0", "n1")
        ballast = disk / "ballast"
        fill(ballast)
        first = rounds.frame("n0", (10, 15))
        for _ in range(3):
            with pytest.raises(StorageError) as caught:
                rounds.ledger.push("n0", first)
            assert caught.value.cause == os.strerror(errno.ENOSPC)
        with suppress(StorageError):  # the last page of the journal may still have room
            rounds.lease("n0", 5, request_id=2)
        assert rounds.version == 1
        ballast.unlink()
        assert rounds.ledger.push("n0", first).status == "accepted"
        rounds.restart()
        assert rounds.lease("n0", 5, request_id=2).status == "granted"
        assert rounds.train("n1").status == "accepted"
        assert rounds.version == 2
        assert rounds.counts().lost == 0
        rounds.ledger.close()


def files_are_limited(folder: Path) -> None:
    """Works without root: the process may not make files larger than this."""
    path, unlimited = folder / "log.bin", resource.RLIM_INFINITY
    log = AppendLog(path, "record")
    log.append(frame(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(frame(1)) + 50, unlimited))
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot append"):
            log.append(frame(2))
        assert list(log) == [frame(1)]
        with pytest.raises(StorageError, match="cannot write"):
            write_durable(folder / "state", bytes(len(frame(1)) + 51))
        assert [p.name for p in folder.iterdir()] == ["log.bin"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    log.append(frame(2))
    assert contents(log) == [frame(1), frame(2)]


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case
    for case in (
        log_at_every_write_point,
        log_at_any_moment,
        file_at_every_write_point,
        file_at_any_moment,
        disk_is_full,
        disk_is_full_when_a_file_is_replaced,
        disk_is_full_for_a_hub,
        files_are_limited,
        hub_is_killed_at_every_write_point,
    )
}


def run_case(name: str) -> None:
    """Run a case in a process of its own; fails with what it printed, skips when it is not allowed here."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    command = [sys.executable, __file__, name]
    if name.startswith("disk"):
        command = ["unshare", "--user", "--map-root-user", "--mount", *command]
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment |= {"CIUIC_KILL_EVERY": "1"} if is_soak() else {}
        try:
            done = subprocess.run([*command, folder], env=environment, capture_output=True, text=True, timeout=120)
        except FileNotFoundError:
            pytest.skip("there is no `unshare` on this machine")
    if done.returncode == CANNOT or "unshare" in done.stderr:
        pytest.skip("this machine does not let us mount a small disk")
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))

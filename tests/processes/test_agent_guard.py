"""The guard: nothing of a worker outlives its agent or its own main process."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from net_processes import is_alive, wait_until

from ciuic.node import guard

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Run Python source under the guard."""
    started: list[subprocess.Popen[bytes]] = []

    def run(source: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, sys.executable, "-c", textwrap.dedent(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def _order(process: subprocess.Popen[bytes], order: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(order)


SLEEPER = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, (str(os.getpid()) + chr(10)).encode())
    time.sleep(600)
"""

FAMILY = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import os, time; os.write(1, (str(os.getpid()) + chr(10)).encode()); time.sleep(600)"
    children = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(2)]
    os.write(1, (str(os.getpid()) + chr(10)).encode())
    time.sleep({sleep})
"""
"""A worker and two children, all deaf to SIGTERM (it is inherited), the children in sessions of their own."""


@pytest.mark.parametrize("code", [0, 1, 42])
def test_the_workers_exit_code_is_the_guards(start: Start, code: int) -> None:
    assert start(f"raise SystemExit({code})").wait(20) == code


def test_a_signal_becomes_128_plus_its_number(start: Start) -> None:
    assert start("import os; os.kill(os.getpid(), 9)").wait(20) == 137


def test_a_program_that_is_not_there_is_said(start: Start) -> None:
    process = start(f"""
        import os, subprocess, sys
        os.dup2(1, 2)
        command = [sys.executable, "-I", "-S", {guard.__file__!r}, "/no/such/program"]
        inner = subprocess.Popen(command, stdin=subprocess.PIPE)
        raise SystemExit(inner.wait())
    """)
    assert _line(process) == "/no/such/program cannot be started: No such file or directory"
    assert process.wait(20) == 127


def test_the_worker_is_asked_first(start: Start) -> None:
    process = start(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        print("armed", flush=True)
        time.sleep(600)
        """
    )
    assert _line(process) == "armed"
    _order(process, b"T")
    assert process.wait(20) == 5


def test_a_worker_that_does_not_listen_is_killed(start: Start) -> None:
    process = start(SLEEPER)
    worker = int(_line(process))
    _order(process, b"T")
    _order(process, b"K")
    assert process.wait(20) == 137
    assert not is_alive(worker)


def test_children_in_sessions_of_their_own_are_killed_too(start: Start) -> None:
    process = start(FAMILY.format(sleep=600))
    family = [int(_line(process)) for _ in range(3)]
    _order(process, b"K")
    process.wait(20)
    assert [pid for pid in family if is_alive(pid)] == []


def test_when_the_agents_end_of_the_pipe_closes_everything_ends(start: Start) -> None:
    process = start(FAMILY.format(sleep=600))
    family = [int(_line(process)) for _ in range(3)]
    assert process.stdin is not None
    process.stdin.close()
    process.wait(20)
    assert [pid for pid in family if is_alive(pid)] == []


def test_what_a_worker_leaves_running_is_ended(start: Start) -> None:
    process = start(FAMILY.format(sleep=0.1))
    family = [int(_line(process)) for _ in range(3)]
    assert process.wait(20) == 0
    assert [pid for pid in family if is_alive(pid)] == []


def test_the_worker_does_not_outlive_a_killed_guard(start: Start) -> None:
    process = start(SLEEPER)
    worker = int(_line(process))
    process.kill()
    wait_until(lambda: not is_alive(worker), "the end of the worker")


def test_an_agent_killed_with_its_session_leaves_nothing(tmp_path: Path) -> None:
    """The guard lives in a session of its own, so it survives the kill and cleans up."""
    agent = f"""
import subprocess, sys, time
worker = "import os, time; os.write(1, (str(os.getpid()) + chr(10)).encode()); time.sleep(600)"
guard = subprocess.Popen([sys.executable, "-I", "-S", {guard.__file__!r}, sys.executable, "-c", worker],
                         stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until(lambda: not is_alive(worker), "the end of the worker")

"""The demo's processes: a log each, killed with everything below them, none left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ciuic.errors import RunFailedError
from ciuic.lab import crew as crew_module
from ciuic.lab.crew import Crew

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def any_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The crew runs `python -c ...` instead of ciuic commands."""
    monkeypatch.setattr(crew_module, "CLI", ("-c",))


def await_true(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def child_of(log: Path) -> psutil.Process:
    await_true(lambda: log.exists() and "child" in log.read_text(), "the family did not start")
    return psutil.Process(int(log.read_text().split()[1]))


def test_a_kill_takes_everything_below_along_and_nobody_misses_it(tmp_path: Path) -> None:
    with Crew(tmp_path) as crew:
        crew.start("family", [FAMILY], {})
        child = child_of(tmp_path / "family.log")
        crew.check()
        crew.kill("family")
        assert not child.is_running()
        crew.check()
        crew.start("family", ["print('again')"], {})
        await_true(lambda: "again" in (tmp_path / "family.log").read_text(), "it was not started again")


def test_leaving_the_block_ends_what_still_runs(tmp_path: Path) -> None:
    with Crew(tmp_path) as crew:
        crew.start("family", [FAMILY], {})
        child = child_of(tmp_path / "family.log")
    assert not child.is_running()


def test_one_that_ends_by_itself_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with Crew(tmp_path) as crew:
        hand = crew.start("hub", ["import sys; print('no port is free'); sys.exit(3)"], {})
        await_true(lambda: hand.exit_code is not None, "it did not end")
        with pytest.raises(RunFailedError, match=r"hub has ended with exit code 3.*no port is free"):
            crew.check()


def test_stop_lets_them_leave_and_kills_the_deaf(tmp_path: Path) -> None:
    polite = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit('bye')); print('ready'); signal.pause()"
    )
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
    with Crew(tmp_path) as crew:
        hands = [crew.start("polite", [polite], {}), crew.start("deaf", [deaf], {"ANSWER": "42"})]
        for hand in hands:
            await_true(lambda h=hand: "ready" in h.log.read_text(), f"{hand.name} did not start")
        crew.stop(["polite", "deaf", "unknown"], patience_s=1.0)
        assert hands[0].last_lines()[-1] == "bye"
        assert all(hand.exit_code is not None for hand in hands)


def test_nothing_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from ciuic.lab import crew
crew.CLI = ("-c",)
with crew.Crew(Path({str(tmp_path)!r})) as made:
    made.start("family", [{FAMILY!r}], {{}})
    time.sleep(600)
"""
    demo = subprocess.Popen([sys.executable, "-c", script])
    try:
        child = child_of(tmp_path / "family.log")
    finally:
        os.kill(demo.pid, signal.SIGKILL)
        demo.wait()
    await_true(lambda: not child.is_running(), "a process outlived the demo")

"""The demo's processes: started with a log each, stopped or killed with everything below them.

Each runs under the node's guard (ciuic.node.guard), so nothing outlives the demo, not even if it is killed.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from ciuic.errors import RunFailedError
from ciuic.node import guard

CLI = ("-m", "ciuic.cli.main")
KILL_S = 15.0
_TAIL_LINES = 12


class Hand:
    """One process of the crew, with everything it starts."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,  # Ctrl-C reaches the demo, which stops its crew in order
            )

    @property
    def guard_pid(self) -> int:
        """Process id of its guard; the program is the guard's child."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._guard.poll()

    def terminate(self) -> None:
        """SIGTERM: finish and leave."""
        self._order(b"T")

    def kill(self) -> None:
        """SIGKILL to it and everything below it, as when a machine loses its power; returns when all are gone."""
        self._order(b"K")
        try:
            self._guard.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    def wait(self, deadline: float) -> bool:
        """Whether it has ended by `deadline` (of time.monotonic)."""
        try:
            self._guard.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._guard.stdin.close()

    def last_lines(self) -> list[str]:
        """The end of its log."""
        with self.log.open(errors="replace") as lines:
            return [line.rstrip() for line in deque(lines, _TAIL_LINES)]

    def _order(self, order: bytes) -> None:
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._guard.stdin.write(order)
                self._guard.stdin.flush()


class Crew:
    """All of them. Leaving the `with` block stops what still runs, the last started first."""

    def __init__(self, logs: Path, *, owner: str = "demo") -> None:
        """`owner`: whose processes they are, for error messages."""
        logs.mkdir(parents=True, exist_ok=True)
        self._owner = owner
        self._logs = logs
        self._hands: dict[str, Hand] = {}

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for hand in reversed(self._hands.values()):
            if hand.exit_code is None:
                hand.kill()
            hand.close()

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Hand:
        """Run `ciuic ARGUMENTS`. A killed one may be started again and continues its log."""
        return self.run(name, [sys.executable, *CLI, *arguments], environment)

    def run(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Hand:
        """Run any command, for example in a namespace (`ciuic.lab.switch_sites`)."""
        hand = Hand(name, command, log=self._logs / f"{name}.log", environment=environment)
        self._hands[name] = hand
        return hand

    def kill(self, name: str) -> None:
        """SIGKILL to one of them and everything below it; from then on nobody misses it."""
        hand = self._hands.pop(name)
        hand.kill()
        hand.close()

    def check(self) -> None:
        """Raises RunFailedError when one has ended by itself."""
        for hand in self._hands.values():
            if hand.exit_code is not None:
                raise RunFailedError(
                    f"the {self._owner}'s {hand.name} has ended with exit code {hand.exit_code}",
                    cause="; ".join(line for line in hand.last_lines() if line.strip())[-800:] or "it said nothing",
                    next=f"read {hand.log}",
                )

    def stop(self, names: Sequence[str], patience_s: float) -> None:
        """Ask these to leave, together; kill what is still there after `patience_s`."""
        hands = [self._hands[name] for name in names if name in self._hands]
        for hand in hands:
            hand.terminate()
        deadline = time.monotonic() + patience_s
        for hand in hands:
            if not hand.wait(deadline):
                hand.kill()

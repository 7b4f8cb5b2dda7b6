"""A joiner's bases, fetched while its program still builds the model: the snapshots, and the entries after them.

Nothing depends on it: what is not here, or is not what the hub then says, is fetched in the usual way.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ciuic.errors import CiuicError
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.net.peer_messages import SourceOutcome
from ciuic.train.early import EarlyEntries
from ciuic.train.runfile import Connect, RunFile

LOOK_EVERY_S = 0.2
CLOSE_S = 5.0
_log = logging.getLogger("ciuic.train")


def snapshot_file(folder: Path, fragment: int, version: int) -> Path:
    """Where a snapshot is kept until it is loaded."""
    return folder / f"snapshot-{fragment}-{version}.frame"


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A snapshot that is here."""

    version: int
    outcomes: list[SourceOutcome]
    """How it went with other nodes that hold it."""
    early: EarlyEntries | None
    """The entries after it."""


@dataclass(kw_only=True)
class _One:
    """The base of one fragment."""

    state: m.FragmentState
    file: Path
    early: EarlyEntries | None = None
    outcomes: list[SourceOutcome] | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


class BasesAhead:
    """Fetches the fragments that the hub serves, one after the other, on a thread of its own."""

    def __init__(self, connect: Connect, info: RunFile, states: list[m.FragmentState]) -> None:
        self._connect, self._run_id = connect, info.run_id
        self._bases = {
            number: _One(state=state, file=snapshot_file(info.folder, number, state.snapshot_version))
            for number, state in enumerate(states)
            if not state.url and state.version > 0
        }
        self._follows = len(states) == 1
        """Entries of several fragments are fetched with their snapshots, one fragment after the other."""
        self._client: HubClient | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._fetch, name="ciuic-ahead", daemon=True)
        self._thread.start()

    def take(self, number: int, state: m.FragmentState, stop: threading.Event) -> Fetched | None:
        """The base of a fragment, once it is here; None: it must be fetched. `state`: what the hub says of it now.

        An older snapshot serves as well as the newest one when the entries after it come by themselves.
        """
        one = self._bases.get(number)
        if one is None:
            return None
        if one.state.snapshot_version != state.snapshot_version and not self._follows:
            self._stop()
            return None
        while not one.is_over.wait(LOOK_EVERY_S):
            if stop.is_set():
                return None
        if one.outcomes is None:
            return None
        del self._bases[number]
        return Fetched(version=one.state.snapshot_version, outcomes=one.outcomes, early=one.early)

    def close(self) -> None:
        """What nobody has taken is not needed."""
        until_s = time.monotonic() + CLOSE_S
        while self._thread.is_alive() and time.monotonic() < until_s:  # it may just be opening a connection
            self._stop()
            self._thread.join(LOOK_EVERY_S)
        for one in self._bases.values():
            if one.early is not None:
                one.early.close()
            for file in one.file.parent.glob(f"{one.file.name}*"):
                file.unlink(missing_ok=True)
        self._bases.clear()

    def _stop(self) -> None:
        self._is_over = True
        if self._client is not None:
            self._client.interrupt()

    def _fetch(self) -> None:
        bases = list(self._bases.items())
        try:
            if self._follows and bases:
                one = bases[0][1]
                one.early = EarlyEntries(self._connect("snapshots"), self._run_id, 0, one.state)
            client = self._client = self._connect("snapshots")
            for number, one in bases:
                if self._is_over:
                    break
                path = f"{m.API}/runs/{self._run_id}"
                one.outcomes = client.download_snapshot(path, one.file, one.state, number)
                _log.debug("joining: has the snapshot of fragment %d ahead of its model", number)
                one.is_over.set()
        except CiuicError as error:  # it is fetched in the usual way
            _log.debug("joining: a snapshot did not come ahead of its model: %s", error)
        finally:
            if self._client is not None:
                self._client.close()
            for _, one in bases:
                one.is_over.set()

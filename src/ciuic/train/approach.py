"""What a joiner will need, begun while its program still builds the model: its connections and its bases.

Over a long way a TLS connection costs two round trips before its first request. Nothing depends on these: what is not
here, or stood idle for too long, is opened by whoever needs it.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ciuic.errors import CiuicError
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.net.tls import Purpose
from ciuic.net.transfer_down import COLD_LANES
from ciuic.train.ahead import BasesAhead, Fetched
from ciuic.train.early import PARTS
from ciuic.train.ledger_copy import FOLDER
from ciuic.train.runfile import RunFile

IDLE_S = 15.0
"""The hub ends a new connection that has asked for nothing for 20 s."""
_log = logging.getLogger("ciuic.train")


class Opened:
    """One client whose connections are opened on a thread of their own."""

    def __init__(self, client: HubClient, open_it: Callable[[HubClient], None]) -> None:
        self._client, self._open_it, self._began_s = client, open_it, time.monotonic()
        self._is_unwanted = False
        self._thread = threading.Thread(target=self._open, name="ciuic-approach", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        self._open_it(self._client)
        if self._is_unwanted:
            self._client.close()

    def take(self) -> HubClient:
        """The client; its connections are open, or are opened by its first use."""
        self._thread.join()
        if time.monotonic() - self._began_s > IDLE_S:
            self._client.close()
        return self._client

    def close(self) -> None:
        """Nobody needs it. Does not wait for what is being opened."""
        self._is_unwanted = True
        self._client.interrupt()
        if not self._thread.is_alive():
            self._client.close()


class Approach:
    """Of one worker: its connections, and its bases. Thread-safe."""

    def __init__(self, info: RunFile) -> None:
        self._info = info
        self._ready: dict[Purpose, list[Opened]] = {}
        self._lock = threading.Lock()
        self._ahead: BasesAhead | None = None
        self._is_over = False
        self._is_back = (info.folder / FOLDER).exists()
        """This node has trained in the run before: it will need all of it."""

    def begin(self) -> None:
        """Open the first connection and ask over it whether there is a base to fetch; if so, begin to."""
        with suppress(CiuicError, OSError):  # whoever needs a connection will say why there is none
            self._open("control", self._look)
            if self._is_back:
                self._open_all()

    def connect(self, purpose: Purpose, url: str = "") -> HubClient:
        """A connection that was opened for this purpose, or a new one."""
        with self._lock:
            waiting = self._ready.get(purpose, []) if not url else []
            opened = waiting.pop(0) if waiting else None
        return self._info.connect(purpose, url) if opened is None else opened.take()

    def base(self, number: int, state: m.FragmentState, stop: threading.Event) -> Fetched | None:
        """A fragment's base that was fetched ahead; None: it must be fetched. Waits for it while it is on its way."""
        return None if self._ahead is None else self._ahead.take(number, state, stop)

    def close(self) -> None:
        """What nobody has taken is not needed any more."""
        with self._lock:
            self._is_over = True
            left = [opened for waiting in self._ready.values() for opened in waiting]
            self._ready.clear()
        for opened in left:
            opened.close()
        if self._ahead is not None:
            self._ahead.close()

    def _look(self, client: HubClient) -> None:
        with suppress(CiuicError):
            states = client.call("GET", f"{m.API}/runs/{self._info.run_id}/bases", None, m.BasesReply).fragments
            if not any(state.version > 0 for state in states):
                return
            _log.debug("joining: the run is at version %d", states[0].version)
            if not self._is_back:
                self._open_all()
            self._ahead = BasesAhead(self.connect, self._info, states)
            if self._is_over:
                self._ahead.close()

    def _open_all(self) -> None:
        """What a joiner uses: for entries, the snapshot, pushes; for entries later on, leases and reports."""
        kinds: tuple[Purpose, ...] = ("snapshots", "snapshots", "updates")
        for purpose, lanes in zip(kinds, (PARTS, COLD_LANES, COLD_LANES), strict=True):
            self._open(purpose, partial(HubClient.open, lanes=lanes))
        for purpose in ("updates", "control", "control", "control"):
            self._open(purpose, HubClient.open)

    def _open(self, purpose: Purpose, open_it: Callable[[HubClient], None]) -> None:
        client = self._info.connect(purpose)
        with self._lock:
            if not self._is_over:
                self._ready.setdefault(purpose, []).append(Opened(client, open_it))

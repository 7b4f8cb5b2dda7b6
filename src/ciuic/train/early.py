"""Entries that a joiner will need, fetched while its snapshot is on the way: those there are, then each new one."""

import logging
import threading
from functools import partial
from itertools import pairwise

from ciuic.errors import CiuicError
from ciuic.ledger.entry import entry_from_frame
from ciuic.ledger.frame import split_frames
from ciuic.net.client import HubClient
from ciuic.net.messages import API, FragmentState

LOOK_EVERY_S = 0.2
LONG_POLL_S, SILENCE_S = 20.0, 15.0
HELD_BYTES = 64 << 20
"""So much may wait for the snapshot."""
PARTS = 6
"""Connections for the entries that there are already."""
_log = logging.getLogger("ciuic.train")


def entries_path(run_id: str, fragment: int, after: int, *, wait_s: float = 0.0, most: int = 0) -> str:
    """Where a joiner asks for entries: at most `most` of them; while there are none the answer is held for `wait_s`."""
    query = f"fragment={fragment}&after={after}&wait_s={wait_s:g}&joining=1" + (f"&most={most}" if most else "")
    return f"{API}/runs/{run_id}/entries?{query}"


class EarlyEntries:
    """What the hub answers on a connection of its own. Nothing depends on its coming."""

    def __init__(self, client: HubClient, run_id: str, fragment: int, state: FragmentState) -> None:
        """Begins to fetch the entries after the fragment's snapshot."""
        self.after = state.snapshot_version
        """Version up to which entries were taken."""
        self._client, self._path, self._known = client, partial(entries_path, run_id, fragment), state.version
        self._data: list[bytes] = []
        self._is_current = self._is_over = self._has_failed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="ciuic-early", daemon=True)
        self._thread.start()

    def take(self, stop: threading.Event, *, are_due: bool = False) -> bytes | None:
        """The frames that came since the last time, b"" when there are no more yet; None: ask in the usual way.

        Waits for an answer that is due, until `stop` is set. `are_due`: the hub is known to have sent more.
        """
        with self._changed:
            while not (self._data or self._has_failed or (self._is_current and not are_due)) and not stop.is_set():
                self._changed.wait(LOOK_EVERY_S)
            data = b"".join(self._data)
            self._data.clear()
            self._changed.notify_all()
            if not data and not self._is_current:
                return None
            self.after += sum(1 for _ in split_frames(data, "entry"))
            return data

    def close(self) -> None:
        """End what is still on its way."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        while self._thread.is_alive():  # it may just be opening a connection, which nothing interrupts
            self._client.interrupt()
            self._thread.join(LOOK_EVERY_S)

    def _follow(self) -> None:
        wait_s = 0.0
        try:
            version = self._fetch_known()
            while not self._is_over:
                data = self._fetch(self._path(version, wait_s=wait_s), wait_s + SILENCE_S)
                version = max([version, *versions_in(data)])
                wait_s = LONG_POLL_S if self._came(data) else 0.0
        except CiuicError as error:  # the joiner asks again in its usual way
            if not self._is_over:
                _log.info("entries do not come beside the snapshot any more: %s", error)
        finally:
            with self._changed:
                self._has_failed, self._is_current = True, False
                self._changed.notify_all()
            self._client.close()

    def _fetch(self, path: str, timeout_s: float) -> bytes:
        """One answer; from its first bytes on there is more to come, also for who takes meanwhile."""
        pieces: list[bytes] = []

        def sink(piece: bytes) -> None:
            pieces.append(piece)
            self._is_current = False

        self._client.fetch(path, sink, timeout_s=timeout_s)
        return b"".join(pieces)

    def _fetch_known(self) -> int:
        """What there is, in parts side by side: they share the line with as many connections of the snapshot."""
        count = min(PARTS, self._known - self.after)
        if count < 1:
            return self.after
        ends = [self.after + (self._known - self.after) * part // count for part in range(count + 1)]
        paths = [self._path(start, most=end - start) for start, end in pairwise(ends)]
        version = self.after
        for data, end in zip(self._client.fetch_parts(paths), ends[1:], strict=True):
            version = max([version, *versions_in(data)])
            self._keep(data)
            if version < end:  # an answer has a largest size; the rest is asked for
                break
        return version

    def _keep(self, data: bytes) -> None:
        with self._changed:
            self._data += [data] if data else []
            self._changed.notify_all()

    def _came(self, data: bytes) -> bool:
        """Keep an answer; whether the hub had nothing more. Waits while too much is kept."""
        with self._changed:
            self._data += [data] if data else []
            self._is_current = not data
            self._changed.notify_all()
            while sum(map(len, self._data)) > HELD_BYTES and not self._is_over:
                self._changed.wait()
            return self._is_current


def versions_in(data: bytes) -> list[int]:
    """Versions of the entries in an answer."""
    return [entry_from_frame(frame).header.version for frame in split_frames(data, "entry")]

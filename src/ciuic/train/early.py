"""Entries that a joiner will need, fetched while its snapshot is on the way."""

import logging
import threading
from collections.abc import Callable

from ciuic.errors import CiuicError
from ciuic.net.client import HubClient
from ciuic.net.tls import Purpose

LOOK_EVERY_S = 0.2
_log = logging.getLogger("ciuic.train")


class EarlyEntries:
    """One answer of the hub, asked for at once on a connection of its own. Nothing depends on its coming."""

    def __init__(self, connect: Callable[[Purpose], HubClient], path: str, after: int) -> None:
        """Begins to fetch: `path` gives the entries after version `after`."""
        self.after = after
        self._client = connect("snapshots")
        self._path = path
        self._data = b""
        self._thread = threading.Thread(target=self._fetch, name="ciuic-early", daemon=True)
        self._thread.start()

    def take(self, stop: threading.Event) -> bytes:
        """The entries' frames; empty when there are none, or they did not come. Waits for them until `stop` is set."""
        while self._thread.is_alive() and not stop.is_set():
            self._thread.join(LOOK_EVERY_S)
        self.close()
        return self._data

    def close(self) -> None:
        """End what is still on its way."""
        self._client.interrupt()
        self._thread.join()

    def _fetch(self) -> None:
        try:
            self._data = self._client.fetch(self._path)
        except CiuicError as error:  # the joiner asks again in its usual way
            _log.info("entries did not come beside the snapshot: %s", error)
        finally:
            self._client.close()

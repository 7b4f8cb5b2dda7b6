"""Entries that a joiner will need, fetched while its snapshot is on the way."""

import logging
import threading
from collections.abc import Callable

from ciuic.errors import CiuicError
from ciuic.net.client import HubClient
from ciuic.net.tls import Purpose

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

    def take(self) -> bytes:
        """The entries' frames; empty when there are none, or they did not come. Waits for what is on its way."""
        self._thread.join()
        return self._data

    def close(self) -> None:
        """Not needed after all."""
        self._client.interrupt()
        self._thread.join()

    def _fetch(self) -> None:
        try:
            self._data = self._client.fetch(self._path)
        except CiuicError as error:  # the joiner asks again in its usual way
            _log.info("entries did not come beside the snapshot: %s", error)
        finally:
            self._client.close()

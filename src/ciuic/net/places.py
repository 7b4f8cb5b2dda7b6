"""Where the fragments of a run are served, as a node knows it: at the hub, or at shards that may change.

A fragment that has moved answers MovedError, a shard that was killed does not answer: then the hub is asked again, and
what was to be said is said at the new address. Everything a node says may be repeated.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ciuic.errors import CiuicError, FrameError, MovedError, StorageError, UnreachableError
from ciuic.net.client import HubClient, backoff_s
from ciuic.net.shard_messages import PlacesReply
from ciuic.net.tls import Purpose

DAMAGED_LIMIT = 5
"""So many refusals of the same bytes are no accident."""
PATIENCE_S = 2.0
"""A place that does not answer is asked again so often at least: a restarted shard must not wait for a back-off."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Places:
    """Addresses of the fragments of one run. Thread-safe."""

    run_id: str
    connect: Callable[[Purpose, str], HubClient]
    """A connection to an address; empty: the hub."""
    urls: list[str] = field(default_factory=list)
    """By fragment; empty: the hub. Fragments beyond its end are at the hub."""

    def url(self, fragment: int) -> str:
        """Where a fragment is served, as last heard."""
        return self.urls[fragment] if fragment < len(self.urls) else ""

    def refresh(self) -> None:
        """Ask the hub. What was known holds when it does not answer."""
        client = self.connect("control", "")
        try:
            self.urls = client.call("GET", f"/v1/runs/{self.run_id}/places", None, PlacesReply).urls
        except (UnreachableError, MovedError) as error:
            _log.debug("the hub did not say where the fragments are: %s", error)
        finally:
            client.close()


class Line:
    """One thread's connections to the places of fragments."""

    def __init__(
        self, places: Places, purpose: Purpose, opened: Callable[[HubClient], object] = lambda client: None
    ) -> None:
        """`opened` is called with each new connection."""
        self._places, self._purpose, self._opened = places, purpose, opened
        self._clients: dict[str, HubClient] = {}

    def say(self, fragment: int, call: Callable[[HubClient], T], *, stop: threading.Event, what: str) -> T:
        """`call` with a connection to the fragment's place, until it succeeds or `stop` is set.

        Repeated while the place is unreachable, has no space, or was not the right one.
        """
        failures = damaged = 0
        while True:
            try:
                result = call(self._client(self._places.url(fragment)))
            except (UnreachableError, StorageError, FrameError, MovedError) as error:
                damaged += isinstance(error, FrameError)
                failures += 1
                if stop.is_set() or damaged >= DAMAGED_LIMIT:
                    raise
                self._tell(what, error, failures)
                if stop.wait(min(PATIENCE_S, backoff_s(failures))):
                    raise
                self._places.refresh()
            else:
                return result

    def _client(self, url: str) -> HubClient:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = self._places.connect(self._purpose, url)
            self._opened(client)
        return client

    def _tell(self, what: str, error: CiuicError, failures: int) -> None:
        if failures == 1 and not isinstance(error, MovedError):
            _log.warning("%s: %s; trying again", what, error)

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

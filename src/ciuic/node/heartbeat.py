"""The agent's heartbeat: a long poll on a connection of its own, in a thread of its own, through any outage."""

import logging
import threading
import time
from collections.abc import Callable

from ciuic.errors import AccessError, CiuicError, NotFoundError, SupersededError
from ciuic.net.client import HubClient, backoff_s
from ciuic.net.connection import INTERRUPTED, is_handshake_error
from ciuic.net.messages import HeartbeatReply, HeartbeatRequest
from ciuic.units import format_duration

_SILENCE_S = 10.0
"""An answer may be this late before the connection counts as dead."""
_SHORTEST_PAUSE_S = 0.05
_log = logging.getLogger(__name__)


class Heartbeat:
    """Beats until it is stopped or the hub says that this agent has no place any more."""

    def __init__(
        self,
        client: HubClient,
        *,
        compose: Callable[[int, int, float], HeartbeatRequest],
        on_reply: Callable[[HeartbeatReply], None],
        on_fatal: Callable[[Exception], None],
        wait_s: float,
    ) -> None:
        """`compose(sequence, known_revision, wait_s)` makes a beat. All callbacks run in the heartbeat's thread."""
        self._client = client
        self._compose, self._on_reply, self._on_fatal = compose, on_reply, on_fatal
        self._longest_wait_s = self._wait_s = wait_s
        self._stop = threading.Event()
        self._poked = threading.Event()
        self._heard = False
        self._lost_at: float | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="ciuic-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Something changed here: end the present long poll and beat at once."""
        self._poked.set()
        self._client.interrupt()

    def stop(self) -> None:
        """End the thread; no beat is sent after this returns."""
        self._stop.set()
        self.poke()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._beat_on()
        except Exception as error:  # noqa: BLE001 - an agent without a heartbeat must end loudly, whatever the cause
            self._on_fatal(error)
        finally:
            self._client.close()

    def _beat_on(self) -> None:
        sequence = revision = 0
        while not self._stop.is_set():
            sequence += 1
            self._poked.clear()
            if self._stop.is_set():
                return
            began = time.monotonic()
            try:
                request = self._compose(sequence, revision, self._wait_s)
                reply = self._client.call(
                    "POST", "/v1/node/heartbeat", request, HeartbeatReply, timeout_s=self._wait_s + _SILENCE_S
                )
            except CiuicError as error:
                if self._poked.is_set() or error.cause == INTERRUPTED:
                    continue
                if self._is_fatal(error):
                    raise
                self._lost(error)
                continue
            self._back()
            self._on_reply(reply)
            changed, revision = reply.revision != revision, reply.revision
            early_s = 0.0 if changed else self._wait_s - (time.monotonic() - began)
            self._wait_s = max(_SHORTEST_PAUSE_S, min(self._longest_wait_s, reply.heartbeat_s))
            if early_s > 0:  # the hub did not hold the poll: keep its pace all the same
                self._poked.wait(early_s)

    def _is_fatal(self, error: CiuicError) -> bool:
        """Only the hub itself, on the pinned connection, can send an agent home once it has been heard."""
        if self._heard and is_handshake_error(error):
            return False
        return isinstance(error, AccessError | SupersededError | NotFoundError)

    def _lost(self, error: CiuicError) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            _log.warning(
                "the hub does not answer: %s (%s); trying again; a worker goes on meanwhile", error.message, error.cause
            )
        self._failures += 1
        self._poked.wait(backoff_s(self._failures))

    def _back(self) -> None:
        self._heard = True
        if self._lost_at is not None:
            _log.warning("the hub is back after %s", format_duration(time.monotonic() - self._lost_at))
        self._lost_at, self._failures = None, 0

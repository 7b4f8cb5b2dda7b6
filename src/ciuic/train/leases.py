"""The samples this worker may train: leased ahead of need, handed out in order, taken back when work is lost.

They are leased for as long as the hub may be away. What is in hand is told with each request: the hub asks for some of
it back when others run dry, and says what of it others have taken while this worker was out of touch.
"""

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from ciuic.errors import CiuicError
from ciuic.ledger.intervals import IntervalSet, Range
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.train.courier import persistently, post

ASK_AGAIN_S = 0.25
"""How long to wait when the hub has nothing for this worker now, at least."""
ASK_AGAIN_AT_MOST_S = 2.0
ASK_AGAIN_SHARE = 0.25
"""... and otherwise this share of the time for which there are samples."""
TELL_S = 5.0
"""How often a worker that has enough tells what it has."""
MOST_RANGES = 1024
"""So many ranges in hand are told."""
_log = logging.getLogger("ciuic.train")


class Leases:
    """Sample numbers ready to train. The control thread fills it; the training thread takes."""

    def __init__(self, run_id: str, incarnation: int, *, chunk: int, ahead: int, step: int = 1) -> None:
        """`chunk`: least samples per lease; more are asked for when fewer than `ahead` are left; `step`: per step."""
        self.step_s = 0.0
        """Measured time of a step; 0: not known."""
        self.fragments = 1
        """Of the model; when it has several, the run is not complete while one has progress to push."""
        self._run_id, self.incarnation = run_id, incarnation
        self._chunk, self._step = chunk, step
        self.ahead = ahead
        self.unpushed = False
        """Samples were taken since the training thread last had nothing left to push."""
        self.behind: list[int] = []
        """Fragments in which the training thread has progress that is not on its way."""
        self._ready: list[Range] = []
        self._out = IntervalSet()
        """Taken, and not yet with the hub in an accepted push."""
        self._returning: list[Range] = []
        """Given back; the control thread's own."""
        self._is_draining = False
        self._changed = threading.Condition()
        self._request_id = 0
        self._asking = True
        self.final_versions: list[int] | None = None
        """Set when the hub says that the run is complete."""
        self.cpu_s = 0.0
        self._ahead: threading.Thread | None = None

    # ---- the training thread

    def take(self, count: int) -> list[Range]:
        """Up to `count` samples; empty when there are none now."""
        with self._changed:
            taken: list[Range] = []
            while count > 0 and self._ready:
                start, stop = self._ready[0]
                middle = min(stop, start + count)
                taken.append((start, middle))
                count -= middle - start
                if middle == stop:
                    self._ready.pop(0)
                else:
                    self._ready[0] = (middle, stop)
            for start, stop in taken:
                self._out.add(start, stop)
            if taken:
                self.unpushed, self.behind = True, list(range(1, self.fragments))
            self._changed.notify_all()
            return taken

    def put_back(self, ranges: Iterable[Range]) -> None:
        """Work on these was lost (a non-finite step): train them again, first."""
        with self._changed:
            ranges = list(ranges)
            for start, stop in ranges:
                self._out.remove(start, stop)
            self._ready[:0] = ranges
            self._changed.notify_all()

    def accepted(self, ranges: Iterable[Range]) -> None:
        """The hub has stored a push with these: whatever happens to this worker, they are not trained again."""
        with self._changed:
            for start, stop in ranges:
                self._out.remove(start, stop)

    def drain(self) -> None:
        """This worker leaves: what it has not started goes back at once, and nothing more is asked for."""
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Until there are samples or the run is complete; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready) or self.final_versions is not None, timeout_s)

    @property
    def ready(self) -> list[Range]:
        """Not started yet, in the order in which they will be."""
        with self._changed:
            return list(self._ready)

    @property
    def has_samples(self) -> bool:
        with self._changed:
            return bool(self._ready)

    @property
    def may_come(self) -> bool:
        """An answer of the hub is on its way that may bring samples."""
        with self._changed:
            return self._asking

    @property
    def is_complete(self) -> bool:
        return self.final_versions is not None

    # ---- the control thread

    def loop(self, client: HubClient, stop: threading.Event) -> None:
        """Keep enough samples ready until the run is complete."""
        while not stop.is_set() and not self.is_complete:
            count = self._wanted()
            reply: m.LeaseReply = persistently(
                lambda n=count: post(client, self._run_id, "lease", self.request(n), m.LeaseReply),
                stop=stop,
                what="leasing samples",
            )
            self.take_reply(reply)
            _log.debug("leases: asked for %d samples, %s", count, reply.status)
            self.cpu_s = time.thread_time()
            if reply.status == "wait" and not reply.give_back and count:
                stop.wait(self._pause_s())

    def ask_ahead(self, client: HubClient) -> None:
        """Send the first request now, on a thread of its own, while the base is still caught up."""

        def ask() -> None:
            with suppress(CiuicError):  # the loop asks the same again
                reply = post(client, self._run_id, "lease", self.request(self._wanted()), m.LeaseReply)
                _log.debug("leases: asked ahead, %s", reply.status)
                self.take_reply(reply)
            client.close()

        self._ahead = threading.Thread(target=ask, name="ciuic-first-lease", daemon=True)
        self._ahead.start()

    def asked_ahead(self) -> None:
        """Wait for the answer to the first request; before `loop`."""
        if self._ahead is not None:
            self._ahead.join()

    def _wanted(self) -> int:
        """How many samples to ask for; waits while there are enough, and then tells only (0)."""
        until = time.monotonic() + TELL_S
        with self._changed:
            while True:
                ready = self._count()
                enough = self._is_draining or ready >= self.ahead
                self._asking = not enough
                if not enough:
                    return max(self._chunk, self.ahead - ready)
                left_s = until - time.monotonic()
                if left_s <= 0 or (self._is_draining and ready) or self._returning:
                    return 0
                self._changed.wait(left_s)

    def _count(self) -> int:
        return sum(stop - start for start, stop in self._ready)

    def _pause_s(self) -> float:
        """Who has enough for a while need not ask so often."""
        with self._changed:
            ready_s = self._count() / self._step * self.step_s
        return min(ASK_AGAIN_AT_MOST_S, max(ASK_AGAIN_S, ASK_AGAIN_SHARE * ready_s))

    def request(self, count: int) -> m.LeaseRequest:
        """As things are now, also when an earlier try was lost."""
        with self._changed:
            if self._is_draining:
                self._returning += self._ready
                self._ready.clear()
            held = self._out.copy()
            for start, stop in self._ready:
                held.add(start, stop)
            ready = self._count()
        return m.LeaseRequest(
            incarnation=self.incarnation,
            count=count,
            request_id=self._request_id + 1,
            step=self._step,
            unpushed=self.unpushed and self.fragments > 1,
            behind=self.behind,
            ready=ready,
            holds=list(held)[:MOST_RANGES],
            returned=self._returning[:MOST_RANGES],
        )

    def take_reply(self, reply: m.LeaseReply) -> None:
        with self._changed:
            self._asking = reply.status == "granted"
            del self._returning[:MOST_RANGES]
            self._drop(reply.void)
            if reply.status == "granted":
                self._request_id += 1
                self._ready.extend((a, b) for a, b in reply.ranges)
            elif reply.status == "finished":
                self.final_versions = list(reply.final_versions)
            self._split_off(reply.give_back)
            self._changed.notify_all()

    def _drop(self, void: list[Range]) -> None:
        """What others have taken is not started here any more."""
        for start, stop in void:
            self._ready = [
                part for a, b in self._ready for part in ((a, min(b, start)), (max(a, stop), b)) if part[0] < part[1]
            ]

    def _split_off(self, count: int) -> None:
        """The last `count` samples go back."""
        while count > 0 and self._ready:
            start, stop = self._ready.pop()
            middle = max(start, stop - count)
            self._returning.append((middle, stop))
            count -= stop - middle
            if start < middle:
                self._ready.append((start, middle))

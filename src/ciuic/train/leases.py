"""The samples this worker may train: leased ahead of need, handed out in order, taken back when work is lost."""

import threading
import time
from collections.abc import Iterable

from ciuic.ledger.intervals import Range
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.train.courier import persistently, post

ASK_AGAIN_S = 0.25
"""How long to wait when the hub has nothing free but the run is not complete."""


class Leases:
    """Sample numbers ready to train. The control thread fills it; the training thread takes."""

    def __init__(self, run_id: str, incarnation: int, *, chunk: int, ahead: int, step: int = 1) -> None:
        """`chunk`: least samples per lease; more are asked for when fewer than `ahead` are left; `step`: per step."""
        self.fragments = 1
        """Of the model; when it has several, the run is not complete while one has progress to push."""
        self._run_id, self._incarnation = run_id, incarnation
        self._chunk, self._step = chunk, step
        self.ahead = ahead
        self.unpushed = False
        """Samples were taken since the training thread last had nothing left to push."""
        self.behind: list[int] = []
        """Fragments in which the training thread has progress that is not on its way."""
        self._ready: list[Range] = []
        self._changed = threading.Condition()
        self._request_id = 0
        self._asking = True
        self.final_versions: list[int] | None = None
        """Set when the hub says that the run is complete."""
        self.cpu_s = 0.0

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
            if taken:
                self.unpushed, self.behind = True, list(range(1, self.fragments))
            self._changed.notify_all()
            return taken

    def put_back(self, ranges: Iterable[Range]) -> None:
        """Work on these was lost (a non-finite step): train them again, first."""
        with self._changed:
            self._ready[:0] = list(ranges)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Until there are samples or the run is complete; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready) or self.final_versions is not None, timeout_s)

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
            with self._changed:
                ready = sum(b - a for a, b in self._ready)
                enough = ready >= self.ahead
                self._asking = not enough
                if enough:
                    self._changed.wait(0.5)
                    continue
            count = max(self._chunk, self.ahead - ready)
            reply: m.LeaseReply = persistently(
                lambda n=count: post(client, self._run_id, "lease", self._request(n), m.LeaseReply),
                stop=stop,
                what="leasing samples",
            )
            self._take_reply(reply)
            self.cpu_s = time.thread_time()
            if reply.status == "wait":
                stop.wait(ASK_AGAIN_S)

    def _request(self, count: int) -> m.LeaseRequest:
        """As things are now, also when an earlier try was lost."""
        return m.LeaseRequest(
            incarnation=self._incarnation,
            count=count,
            request_id=self._request_id + 1,
            step=self._step,
            unpushed=self.unpushed and self.fragments > 1,
            behind=self.behind,
        )

    def _take_reply(self, reply: m.LeaseReply) -> None:
        with self._changed:
            self._asking = reply.status == "granted"
            if reply.status == "granted":
                self._request_id += 1
                self._ready.extend((a, b) for a, b in reply.ranges)
            elif reply.status == "finished":
                self.final_versions = list(reply.final_versions)
            self._changed.notify_all()

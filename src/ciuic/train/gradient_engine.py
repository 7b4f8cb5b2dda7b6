"""The engine of `gradient` mode: each step's gradient is pushed, and the step is made when the mean has come back."""

import logging
import time
from dataclasses import dataclass
from typing import Any

from ciuic.ledger.gradient import GradientReplica
from ciuic.train.engine import Engine
from ciuic.train.gradients import GradientTap

_log = logging.getLogger("ciuic.train")


@dataclass(kw_only=True)
class GradientEngine(Engine):
    """Waits at every step boundary until the hub has said what became of this node's gradient."""

    tap: GradientTap
    lr: float = 0.0
    """The program's learning rate now."""

    def _vector(self, fragment: int) -> Any:
        """What a push is made of: the gradient that was taken."""
        self.machine.lr = self.lr
        return self.tap.of(fragment, self._gradients(fragment).base)

    def _gradients(self, fragment: int) -> GradientReplica:
        replica = self.machine.replicas[fragment]
        if not isinstance(replica, GradientReplica):
            raise TypeError("this engine is for layouts with a step rule")
        return replica

    def boundary(self) -> bool:
        """Push this step's gradient in all fragments; come back when each has merged or was rejected."""
        self._look_ahead()
        changed = self._push_all()
        self.tap.clear()
        began = time.perf_counter()
        while self._in_flight() and not self._may_leave():
            changed = self._process_arrivals(0.5) or changed
        self.meter.stalled(time.perf_counter() - began)
        self._train_dropped_again()
        return changed

    def _may_leave(self) -> bool:
        """A draining worker need not wait for what the hub has stored: it merges without it."""
        pairs = zip(self.machine.replicas, self._turns, strict=True)
        return self.draining and all(r.in_flight is None or r.in_flight.sequence <= t.acknowledged for r, t in pairs)

    def _train_dropped_again(self) -> None:
        for fragment in range(len(self._turns)):
            replica = self._gradients(fragment)
            if replica.dropped:
                _log.warning(
                    "the gradient of %d samples came too late; they are trained again", _count(replica.dropped)
                )
                self.leases.put_back(replica.dropped)
                replica.dropped = []


def _count(ranges: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)

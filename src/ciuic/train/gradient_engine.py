"""The engine of `gradient` mode: each step's gradient is pushed, and the step is made when the mean has come back."""

import logging
import time
from dataclasses import dataclass

from ciuic.errors import NonFiniteError
from ciuic.ledger.gradient import GradientReplica
from ciuic.train.engine import AHEAD_S, Engine
from ciuic.train.gradients import GradientTap

_log = logging.getLogger("ciuic.train")


@dataclass(kw_only=True)
class GradientEngine(Engine):
    """Waits at every step boundary until the hub has said what became of this node's gradient."""

    tap: GradientTap
    lr: float = 0.0
    """The program's learning rate now."""

    def _push(self, fragment: int) -> bool:
        replica, turn = self._gradients(fragment), self._turns[fragment]
        self.machine.lr = self.lr
        try:
            push = self.machine.push(
                fragment, self.tap.of(fragment, replica.base), self.state.counters() if fragment == 0 else ()
            )
        except NonFiniteError as error:
            self._give_up(turn, error)
            return True
        turn.not_finite = 0
        turn.pushed_at_s = time.perf_counter()
        turn.next_step = self.meter.steps + 1
        self.meter.pushes += 1
        self.leases.ahead = max(self._least_ahead, self._samples_in(AHEAD_S))
        self.courier.send(push)
        return False

    def _gradients(self, fragment: int) -> GradientReplica:
        replica = self.machine.replicas[fragment]
        if not isinstance(replica, GradientReplica):
            raise TypeError("this engine is for layouts with a step rule")
        return replica

    def boundary(self) -> bool:
        """Push this step's gradient in all fragments; come back when each has merged or was rejected."""
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

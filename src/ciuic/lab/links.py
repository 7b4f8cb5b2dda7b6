"""What an emulated link is, and its clock and lanes.

A link belongs to one node and is shared by all of its connections. Each direction is a *lane*: it serialises one
piece after the other at the lane's rate, taking turns between the connections that have something to send. Time on a
link is the link's own: it stands still while the link is down, so an outage shifts everything behind it and loses
nothing.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from ciuic.errors import UsageError

QUEUE_BYTES = 128 * 1024
"""What one connection may have waiting in front of a lane, besides what is in flight."""
_MAX_WINDOW_BYTES = 32 * 1024 * 1024
_TURN_S = 0.002
_MIN_TURN_BYTES, _MAX_TURN_BYTES = 1500, 32 * 1024


@dataclass(frozen=True, kw_only=True)
class Link:
    """One node's access to the network. Raises UsageError for numbers no link can have."""

    name: str
    up_bits_per_s: float
    """From the node to the hub."""
    down_bits_per_s: float
    one_way_delay_s: float
    """Half of the round trip."""
    jitter_s: float = 0.0
    """Each piece is late by up to this much more; the order within a connection stays."""

    def __post_init__(self) -> None:
        check_rate(self.name, self.up_bits_per_s)
        check_rate(self.name, self.down_bits_per_s)
        if not (0 <= self.one_way_delay_s < 60 and 0 <= self.jitter_s < 60):
            raise UsageError(f"link {self.name} has an impossible delay", cause="delay and jitter are 0 to 60 s")

    @property
    def round_trip_s(self) -> float:
        return 2 * self.one_way_delay_s


def check_rate(name: str, bits_per_s: float) -> None:
    """Raises UsageError unless this is a rate that a link can have."""
    if not 0 < bits_per_s < math.inf:
        raise UsageError(
            f"link {name} cannot have a rate of {bits_per_s} bit/s",
            cause="a rate is more than 0 and finite",
            next="use LinkRelay.set_down(True) to stop a link",
        )


class LinkTimer:
    """One call that is due at a link time."""

    def __init__(self, clock: "LinkClock", due: float, call: Callable[[], None]) -> None:
        self._clock = clock
        self._call = call
        self.due = due
        self._handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        self.disarm()
        self._clock.forget(self)

    def arm(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        self._handle = loop.call_at(at, self._fire)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._clock.reach(self)
        self._call()


class LinkClock:
    """Seconds of a link's own time, which stands still between `stop` and `resume`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stopped_at: float | None = None
        self._lost_s = 0.0
        self._reached = 0.0
        self._timers: set[LinkTimer] = set()

    @property
    def stopped(self) -> bool:
        return self._stopped_at is not None

    def now(self) -> float:
        time = self._loop.time() if self._stopped_at is None else self._stopped_at
        return max(time - self._lost_s, self._reached)

    def call_at(self, due: float, call: Callable[[], None]) -> LinkTimer:
        """Call once link time has reached `due`, never earlier and never within this call."""
        timer = LinkTimer(self, due, call)
        self._timers.add(timer)
        if not self.stopped:
            timer.arm(self._loop, due + self._lost_s)
        return timer

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = self._loop.time()
            for timer in self._timers:
                timer.disarm()

    def resume(self) -> None:
        if self._stopped_at is None:
            return
        self._lost_s += self._loop.time() - self._stopped_at
        self._stopped_at = None
        for timer in self._timers:
            timer.arm(self._loop, timer.due + self._lost_s)

    def reach(self, timer: LinkTimer) -> None:
        """A timer fires. What it calls must not see a time before its due, which rounding could otherwise give."""
        self.forget(timer)
        self._reached = max(self._reached, timer.due)

    def forget(self, timer: LinkTimer) -> None:
        self._timers.discard(timer)


class Sender(Protocol):
    """One direction of a connection, as a lane sees it."""

    def take(self, limit_bytes: int) -> tuple[int, float]:
        """Move up to `limit_bytes` from the queue to the wire: (bytes, link time since which they were ready)."""
        ...

    def launch(self, arrive_at: float) -> None:
        """What was taken reaches the other end at this link time."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether there is more in the queue."""
        ...


class Lane:
    """One direction of a link: a rate shared in turns, then a delay."""

    def __init__(self, clock: LinkClock, link: Link, bits_per_s: float, jitter: random.Random) -> None:
        self._clock = clock
        self._link = link
        self._jitter = jitter
        self.bits_per_s = bits_per_s
        self._free_at = 0.0
        self._turns: deque[Sender] = deque()
        self._timer: LinkTimer | None = None

    def set_delay(self, one_way_delay_s: float) -> None:
        """From the next piece on; the order within a connection stays."""
        self._link = replace(self._link, one_way_delay_s=one_way_delay_s)

    @property
    def window_bytes(self) -> int:
        """What one connection may hold in this direction: the lane's content (rate x delay) and a queue."""
        in_flight = self.bits_per_s / 8 * (self._link.one_way_delay_s + self._link.jitter_s)
        return int(min(in_flight + QUEUE_BYTES, _MAX_WINDOW_BYTES))

    @property
    def _turn_bytes(self) -> int:
        return int(min(max(self.bits_per_s / 8 * _TURN_S, _MIN_TURN_BYTES), _MAX_TURN_BYTES))

    def offer(self, sender: Sender) -> None:
        """`sender` has something to send."""
        if sender not in self._turns:
            self._turns.append(sender)
        if self._timer is None:
            self._serve()

    def withdraw(self, sender: Sender) -> None:
        if sender in self._turns:
            self._turns.remove(sender)

    def _serve(self) -> None:
        """Give turns while the lane is free; come back when it is free again."""
        self._timer = None
        now = self._clock.now()
        while self._turns and self._free_at <= now and not self._clock.stopped:
            sender = self._turns.popleft()
            size, ready_at = sender.take(self._turn_bytes)
            self._free_at = max(self._free_at, ready_at) + 8 * size / self.bits_per_s
            late_s = self._link.jitter_s * self._jitter.random()
            sender.launch(self._free_at + self._link.one_way_delay_s + late_s)
            if sender.waiting:
                self._turns.append(sender)
        if self._turns:
            self._timer = self._clock.call_at(max(self._free_at, now), self._serve)

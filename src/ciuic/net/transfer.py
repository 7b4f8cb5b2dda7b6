"""Several kept-alive connections to one address, and how many of them a transfer uses.

One connection carries what the kernel lets it: a window of a few megabytes, or with loss and without BBR far less. So a
large body goes over 1 to 16 connections, as many as the measured product of rate and round trip asks for. They stay
open between transfers, with the windows that they have found.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ciuic.errors import CiuicError, UnreachableError
from ciuic.net.connection import INTERRUPTED
from ciuic.net.exchange import Exchange
from ciuic.net.sockets import BBR, congestion_of, pace, tcp_facts

MOST_STREAMS = 16
LEAST_STREAMS = 4
"""Also before anything was measured. One is slower even where its window would do: BBR leaves its start-up phase only
where the send buffer (4 MiB) holds three times what is on the way, and while it repairs a loss the others go on."""
STREAM_BYTES = 2 * 1024 * 1024
"""What one connection may have on its way, with usual limits of the kernel's send buffer (4 MiB)."""
LOSSY = 1e-4
"""With a larger share of bytes sent again a path loses packets."""
FIRST_PACE, PACE = 1.4, 1.15
"""Times the best rate seen: what all connections together may send after a transfer that made a queue on the way
overflow, which costs more than a higher rate brings. The first such transfer has spent time on finding out, and is
slower than the path."""
SEARCHES, HOLDS, CLEAN = 1.25, 1.02, 10
"""By how much the pace grows after a transfer without overflow: while the path's rate is searched for, and once it is
known, until so many in a row were clean (the path may have become faster)."""
OVERFLOW = 0.01
"""A larger share of bytes sent again is more than a path loses by itself: a queue was full."""
LOST_ANYWAY = 4
"""Overflows in a row although it was paced: the path loses so many by itself, and a lower pace does not help."""
LONG_ROUND_TRIPS = 8
"""Shorter transfers end before they know what a path carries: they are not paced, and teach no pace."""
_RATE_WEIGHT = 0.7
"""Of a slower transfer than the best one, in the estimate of the rate."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One finished transfer."""

    moved_bytes: int
    seconds: float
    round_trip_s: float
    repeated_share: float = 0.0
    """Of the bytes sent, those that the kernel had to send again."""


def wanted_streams(bits_per_s: float, round_trip_s: float, *, lossy: bool, bbr: bool) -> int:
    """How many connections a large transfer should use."""
    if lossy and not bbr:
        return MOST_STREAMS
    return min(MOST_STREAMS, max(LEAST_STREAMS, math.ceil(bits_per_s * round_trip_s / 8 / STREAM_BYTES)))


class StreamCount:
    """Learns from transfers how many connections the next one should use."""

    def __init__(self, count: int = LEAST_STREAMS) -> None:
        self.count = count
        self.bits_per_s = 0.0
        """The best rate seen, forgotten slowly."""
        self._pace = self._long_bits_per_s = self._round_trip_s = 0.0
        self._clean = CLEAN
        """Long transfers without overflow in a row."""
        self._overflows = 0

    def pace_bits_per_s(self, size_bytes: int) -> float:
        """What all connections together should not exceed for a body; 0: nothing is known against more."""
        is_long = 8 * size_bytes >= LONG_ROUND_TRIPS * self._round_trip_s * self._long_bits_per_s
        return self._pace * self._long_bits_per_s if is_long else 0.0

    def learn(self, moved: Moved, *, bbr: bool) -> None:
        """After a transfer. Its rate leaves out the round trip that every request costs."""
        moving_s = max(moved.seconds - moved.round_trip_s, moved.seconds / 4, 1e-6)
        rate = 8 * moved.moved_bytes / moving_s
        self.bits_per_s = _best(rate, self.bits_per_s)
        loses = moved.repeated_share > LOSSY
        if moved.seconds >= LONG_ROUND_TRIPS * moved.round_trip_s:
            self._round_trip_s, self._long_bits_per_s = moved.round_trip_s, _best(rate, self._long_bits_per_s)
            self._learn_pace(overflows=moved.repeated_share > OVERFLOW)
        wanted = wanted_streams(self.bits_per_s, moved.round_trip_s, lossy=loses, bbr=bbr)
        if wanted > self.count or 2 * wanted <= self.count:  # a new connection begins slowly: no change for little
            self.count = wanted

    def _learn_pace(self, *, overflows: bool) -> None:
        is_first, is_second = self._pace == 0.0, self._pace == FIRST_PACE
        self._overflows = self._overflows + 1 if overflows else 0
        if self._overflows >= LOST_ANYWAY:
            self._pace *= SEARCHES
        elif overflows:
            self._clean = CLEAN if is_first else 0  # it was paced, and still too much: the rate is known
            self._pace = FIRST_PACE if is_first else PACE
        elif is_second:
            self._pace = PACE
        else:
            self._pace *= SEARCHES if self._clean >= CLEAN else HOLDS
            self._clean += 1


def _best(rate: float, known: float) -> float:
    return max(rate, _RATE_WEIGHT * known + (1 - _RATE_WEIGHT) * rate)


@dataclass(kw_only=True)
class Fan:
    """The connections. A transfer is started by one thread at a time; `interrupt` may come from another."""

    make: Callable[[], Exchange]
    streams: StreamCount = field(default_factory=StreamCount)
    cpu_s: float = 0.0
    """Processor time of the threads that served the connections."""
    repeated_share: float = 0.0
    """Of the latest transfer; see Moved."""
    _lanes: list[Exchange] = field(default_factory=list)
    _before: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(bytes sent, sent again) of each connection's socket before the transfer."""

    def lanes(self, count: int) -> list[Exchange]:
        """The first `count` connections; those that there are not yet are made (and open when they are used)."""
        while len(self._lanes) < count:
            self._lanes.append(self.make())
        return self._lanes[:count]

    def open(self, count: int) -> None:
        """Open the first `count` connections side by side; one that cannot be opened is tried again when it is used."""

        def opened(lane: Exchange) -> None:
            with suppress(CiuicError):
                lane.open()

        self.run([partial(opened, lane) for lane in self.lanes(count)])

    def are_open(self, count: int) -> bool:
        """Whether there are so many connections, all open."""
        return len(self._lanes) >= count and all(lane.sock is not None for lane in self._lanes[:count])

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Do all of them side by side, the first one on this thread; returns when all have ended.

        An error that is not a CiuicError of the work itself is raised here.
        """
        crashes: list[BaseException] = []
        lock = threading.Lock()

        def guarded(work: Callable[[], None]) -> None:
            began_s = time.thread_time()
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised by the thread that waits for all of them
                crashes.append(error)
            with lock:
                self.cpu_s += time.thread_time() - began_s

        threads = [threading.Thread(target=guarded, args=(work,), name="ciuic-lane", daemon=True) for work in works[1:]]
        for thread in threads:
            thread.start()
        try:
            works[0]()
        finally:
            for thread in threads:
                thread.join()
        if crashes:
            raise crashes[0]

    def begin(self, lanes: Sequence[Exchange], size_bytes: int) -> float:
        """Note what the sockets have sent, and pace them for a body of this size; the time now."""
        pace_bits_per_s = self.streams.pace_bits_per_s(size_bytes) / len(lanes)
        self._before = {}
        for number, lane in enumerate(lanes):
            connected = lane.sock
            facts = tcp_facts(connected) if connected is not None else None
            if connected is not None and facts is not None:
                self._before[number] = (facts.sent_bytes, facts.repeated_bytes)
                pace(connected, pace_bits_per_s)
        return time.perf_counter()

    def end(self, lanes: Sequence[Exchange], began_s: float, moved_bytes: int) -> None:
        """Learn from a transfer that went well."""
        round_trips, sent, again, bbr = [], 0, 0, True
        for number, lane in enumerate(lanes):
            connected = lane.sock
            facts = tcp_facts(connected) if connected is not None else None
            if connected is None or facts is None:
                continue
            before = self._before.get(number, (0, 0))
            if facts.sent_bytes < before[0]:
                before = (0, 0)  # it is a new connection
            sent, again = sent + facts.sent_bytes - before[0], again + facts.repeated_bytes - before[1]
            round_trips.append(facts.round_trip_s)
            bbr = bbr and congestion_of(connected) == BBR
        moved = Moved(
            moved_bytes=moved_bytes,
            seconds=time.perf_counter() - began_s,
            round_trip_s=min(round_trips, default=0.0),
            repeated_share=again / sent if sent else 0.0,
        )
        self.repeated_share = moved.repeated_share
        self.streams.learn(moved, bbr=bbr and bool(round_trips))

    def close(self) -> None:
        """Close the connections; the next transfer opens them again."""
        for lane in self._lanes:
            lane.close()

    def interrupt(self) -> None:
        """From another thread: end what is waiting."""
        for lane in list(self._lanes):
            lane.interrupt()


def was_interrupted(error: CiuicError | None) -> bool:
    """Whether `interrupt` ended it: then nothing is tried again."""
    return isinstance(error, UnreachableError) and error.cause == INTERRUPTED

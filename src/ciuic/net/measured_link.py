"""How much of a link one connection gets, and how many more pay.

On a long way with loss one connection reaches a few percent of the link; several together more. The number doubles
from 1 to MOST_STREAMS until it brings less than a tenth.
"""

import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from ciuic.errors import CiuicError
from ciuic.net.client import HubClient
from ciuic.net.probe import LARGEST_BYTES, ROUND_TRIPS_ENOUGH, SMALLEST_BYTES, Health, receive, send
from ciuic.net.sockets import TcpFacts, tcp_facts

MOST_STREAMS = 16
WORTH_MORE_STREAMS = 1.1
"""Twice as many connections must bring this factor."""
MOST_BYTES = 32 * 1024 * 1024
"""Of all connections together, per transfer."""
ENOUGH_S = 1.0
"""About how long a transfer should last, where it is not too large for that."""
LOSS_S = 1.5
"""The same for counting what is lost."""
MOST_PACE = 2**31 - 1
_SO_MAX_PACING_RATE = 47
"""asm-generic/socket.h; bytes per second."""


class GivenUpError(Exception):
    """The node has got work: what is not measured yet waits."""


@dataclass(frozen=True, kw_only=True)
class StreamRates:
    """One direction."""

    one_bits_per_s: float
    bits_per_s: float
    """With `streams` connections."""
    streams: int


Transfer = Callable[[int, int], float]
"""(connections, bytes on all of them together) -> seconds."""


def find_streams(transfer: Transfer, guess_bits_per_s: float, rtt_s: float) -> StreamRates:
    """Double the number of connections, from one on, while that pays. `guess_bits_per_s`: about what one reaches.

    The second of two transfers counts: the first one brings the connections up to speed, and the better of several
    would promise too much where packets are lost. A hub that refuses more connections, or a network that breaks, ends
    the search, and what was found so far counts. Raises what the first transfers raise.
    """
    best: StreamRates | None = None
    streams, enough_s = 1, max(ENOUGH_S, 2 * ROUND_TRIPS_ENOUGH * rtt_s)
    while streams <= MOST_STREAMS:
        reached = guess_bits_per_s if best is None else WORTH_MORE_STREAMS * best.bits_per_s
        count = min(MOST_BYTES, LARGEST_BYTES * streams, max(SMALLEST_BYTES * streams, int(reached * enough_s / 8)))
        try:
            transfer(streams, count)  # new connections start slowly
            took_s = transfer(streams, count)
        except CiuicError:
            if best is None:
                raise
            break
        rate = 8.0 * count / max(took_s - rtt_s, took_s / 4, 1e-6)
        if best is not None and rate < WORTH_MORE_STREAMS * best.bits_per_s:
            break
        one = rate if best is None else best.one_bits_per_s
        best = StreamRates(one_bits_per_s=one, bits_per_s=rate, streams=streams)
        streams *= 2
    return best or StreamRates(one_bits_per_s=guess_bits_per_s, bits_per_s=guess_bits_per_s, streams=1)


class StreamSet:
    """Connections of their own to the hub, opened as they are needed, used at the same time. One thread owns it."""

    def __init__(self, connect: Callable[[], HubClient], *, keep_going: Callable[[], bool]) -> None:
        """`keep_going` is asked before each transfer; False ends the measurement with GivenUpError."""
        self._connect, self._keep_going = connect, keep_going
        self._clients: list[HubClient] = []
        self._threads = ThreadPoolExecutor(MOST_STREAMS, "ciuic-streams")
        self._is_closed = False

    def up(self, streams: int, count: int) -> float:
        """Seconds for `count` bytes to the hub over so many connections. Raises what the client raises."""
        return self._together(send, streams, count)

    def down(self, streams: int, count: int) -> float:
        """The same from the hub."""
        return self._together(receive, streams, count)

    def loss_share(self, bits_per_s: float) -> float | None:
        """Part of what is sent to the hub at half of `bits_per_s` that has to be sent again.

        An estimate of the way's own loss: at full rate the queue in front of the link would overflow and count, too. A
        connection that the kernel paces from its first byte on. None where the kernel does not do or tell that.
        """
        if self._is_closed or not self._keep_going():
            raise GivenUpError
        client = self._connect()
        self._clients.append(client)
        client.call("GET", "/health", None, Health)
        before = None if client.sock is None else _paced(client.sock, bits_per_s / 2)
        if before is None:
            return None
        send(client, min(LARGEST_BYTES, max(SMALLEST_BYTES, int(LOSS_S * bits_per_s / 2 / 8))))
        after = None if client.sock is None else tcp_facts(client.sock)
        sent_bytes = 0 if after is None else after.sent_bytes - before.sent_bytes
        if after is None or sent_bytes <= 0:
            return None
        return min(1.0, max(0, after.repeated_bytes - before.repeated_bytes) / sent_bytes)

    def interrupt(self) -> None:
        """From another thread: end whatever waits."""
        self._is_closed = True
        for client in list(self._clients):
            client.interrupt()

    def close(self) -> None:
        """Close all connections."""
        self._threads.shutdown(wait=True)
        for client in self._clients:
            client.close()

    def _together(self, move: Callable[[HubClient, int], float], streams: int, count: int) -> float:
        if self._is_closed or not self._keep_going():
            raise GivenUpError
        while len(self._clients) < streams:
            client = self._connect()
            self._clients.append(client)
            client.call("GET", "/health", None, Health)  # the handshake does not count
        share = max(1, count // streams)
        began = time.perf_counter()
        running = [self._threads.submit(move, client, share) for client in self._clients[:streams]]
        wait(running)
        took_s = time.perf_counter() - began
        for each in running:
            each.result()
        return took_s


def _paced(connection: socket.socket, bits_per_s: float) -> TcpFacts | None:
    """Let the kernel send no faster; the connection's counts. None where it cannot, or does not count."""
    if sys.platform != "linux":
        return None
    try:
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(min(MOST_PACE, max(1.0, bits_per_s / 8))))
    except OSError:
        return None
    return tcp_facts(connection)

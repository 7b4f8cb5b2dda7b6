"""A switch in user space: moves IP packets between TUN devices as a network of far places would.

    host -- up lane --> (loss) -- path delay --> down lane -- host

Each host has one access link of two lanes with a rate each; each ordered pair of hosts has a path with a delay, a loss
and perhaps a cut. A lane is a router's queue in front of a line: packets leave it one after the other at its rate, and
one that finds the queue full is dropped (tail drop). The kernels of the hosts speak real TCP and meet real queueing,
real loss and real retransmissions. A path may have jitter; packets are never reordered.

Packets are the hosts' MTU large; with 9000 bytes, headers are 0.6 % of the wire bytes (3.5 % with 1500).
"""

import heapq
import os
import random
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field

QUEUE_S = 0.1
"""What a lane's queue holds, in seconds at its rate."""
MIN_QUEUE_BYTES = 128 * 1024
_READ_BYTES = 65536
_TURN_PACKETS = 64
_IDLE_S = 1.0
_DESTINATION = slice(16, 20)
"""Where an IPv4 packet has it."""


@dataclass(kw_only=True, slots=True)
class Lane:
    """One direction of an access link. Times are seconds of one clock."""

    bits_per_s: float
    free_at: float = 0.0
    """When everything accepted so far will have left."""

    def admit(self, at: float, size_bytes: int) -> float:
        """A packet comes at `at`: when its last bit has left; -1.0 when the queue is full and it is dropped."""
        free_at = self.free_at
        if free_at <= at:
            free_at = at
        elif (free_at - at) * self.bits_per_s / 8 + size_bytes > max(QUEUE_S * self.bits_per_s / 8, MIN_QUEUE_BYTES):
            return -1.0
        self.free_at = free_at = free_at + size_bytes * 8 / self.bits_per_s
        return free_at


@dataclass(kw_only=True, slots=True)
class Path:
    """From one host to another."""

    source: "Host"
    target: "Host"
    delay_s: float
    loss: float = 0.0
    """Probability that a packet vanishes between the lanes."""
    jitter_s: float = 0.0
    """Each packet is late by up to this much more."""
    latest: float = 0.0
    """When the packet before leaves the path: none overtakes it."""
    is_cut: bool = False
    sent_bytes: int = 0
    """IP packets that the source's kernel gave out, dropped ones included."""
    sent_packets: int = 0
    delivered_bytes: int = 0
    dropped_packets: int = 0
    """Queues were full."""
    lost_packets: int = 0
    """Vanished by `loss` or a cut."""


@dataclass(kw_only=True, slots=True)
class Host:
    """One place: a TUN device and its access link."""

    name: str
    address: bytes
    fd: int
    up: Lane
    down: Lane
    paths: dict[bytes, Path] = field(default_factory=dict)
    """By the target's address."""


class Switch:
    """All hosts of one network. `hosts` have their paths already; `seed` decides what is lost."""

    def __init__(self, hosts: list[Host], *, seed: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.hosts = hosts
        self._by_fd = {host.fd: host for host in hosts}
        self._clock = clock
        self._chance = random.Random(seed).random
        self._heap: list[tuple[float, int, bool, Path, bytes]] = []
        self._sequence = 0
        self._poll = select.epoll()
        self._watched: dict[int, Callable[[], None]] = {}
        self._ended = False
        for host in hosts:
            self._poll.register(host.fd, select.EPOLLIN)

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Also call this in the loop when `fd` can be read."""
        self._watched[fd] = call
        self._poll.register(fd, select.EPOLLIN)

    def stop(self) -> None:
        """`run` returns after this turn."""
        self._ended = True

    def run(self) -> None:
        """Move packets until `stop`."""
        clock, poll, heap = self._clock, self._poll.poll, self._heap
        while not self._ended:
            wait_s = min(_IDLE_S, max(0.0, heap[0][0] - clock())) if heap else _IDLE_S
            for fd, _ in poll(wait_s):
                host = self._by_fd.get(fd)
                if host is not None:
                    self.read(host)
                else:
                    self._watched[fd]()
            self.advance(clock())
        self._poll.close()

    def read(self, host: Host) -> None:
        """Take in what the host's kernel has sent."""
        fd, now = host.fd, self._clock()
        for _ in range(_TURN_PACKETS):
            try:
                packet = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            self.take(host, packet, now)

    def take(self, host: Host, packet: bytes, now: float) -> None:
        """One packet leaves a host. What is not for another host (IPv6, multicast) is not carried or counted."""
        path = host.paths.get(packet[_DESTINATION])
        if path is None or packet[0] >> 4 != 4:
            return
        size = len(packet)
        path.sent_bytes += size
        path.sent_packets += 1
        leaves_at = host.up.admit(now, size)
        if leaves_at < 0:
            path.dropped_packets += 1
        elif path.is_cut or (path.loss and self._chance() < path.loss):
            path.lost_packets += 1
        else:
            due = leaves_at + path.delay_s
            if path.jitter_s:
                path.latest = due = max(path.latest, due + path.jitter_s * self._chance())
            self._later(due, False, path, packet)

    def advance(self, now: float) -> None:
        """Everything that is due: packets that reach their far access link, packets that reach their host."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            due, _, through, path, packet = heapq.heappop(heap)
            if path.is_cut:
                path.lost_packets += 1
                continue
            if not through:
                leaves_at = path.target.down.admit(due, len(packet))
                if leaves_at < 0:
                    path.dropped_packets += 1
                    continue
                if leaves_at > now:
                    self._later(leaves_at, True, path, packet)
                    continue
            self._deliver(path, packet)

    def _later(self, due: float, through: bool, path: Path, packet: bytes) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, through, path, packet))

    def _deliver(self, path: Path, packet: bytes) -> None:
        try:
            os.write(path.target.fd, packet)
        except OSError:  # its device is full or down: as if the packet had been lost on the last metre
            path.lost_packets += 1
            return
        path.delivered_bytes += len(packet)

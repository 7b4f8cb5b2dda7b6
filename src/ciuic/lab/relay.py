"""A relay in user space that gives loopback connections the rate, delay and faults of a far link. No root needed.

    with LinkRelay(Link(name="eu-central", ...), target=("127.0.0.1", hub_port)) as relay:
        ...  # connect to relay.address instead of the hub
        relay.outage(5)
        print(relay.stats().up_by_purpose["updates"])

It works on streams, not on packets: there is no loss and no slow start, and TCP and IP headers (3 to 5 % on a real
link) are not counted. Everything else costs what it costs on the link: setting up a connection, queueing behind the
node's other connections, waiting for the window of a long fat pipe.
"""

import asyncio
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeVar

from ciuic.errors import UsageError
from ciuic.lab.connection import BUFFER_BYTES, Connection, LinkParts
from ciuic.lab.hello import PURPOSES
from ciuic.lab.links import Lane, Link, LinkClock, check_rate

T = TypeVar("T")
_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class RelayStats:
    """What passed so far: bytes of the TCP streams that were handed to the receiver."""

    name: str
    up_bytes: int
    """From the node to the hub."""
    down_bytes: int
    up_by_purpose: dict[str, int]
    """Keys: hello.PURPOSES. A connection counts as `other` until its first bytes have told its purpose."""
    down_by_purpose: dict[str, int]
    connections_open: int
    connections_total: int
    is_down: bool

    def purpose_bytes(self, purpose: str) -> int:
        """Both directions together."""
        return self.up_by_purpose[purpose] + self.down_by_purpose[purpose]


class RelayLoop:
    """The relay inside one asyncio loop; every method must be called in that loop. LinkRelay is the face for others."""

    def __init__(self, link: Link, listener: socket.socket, target: tuple[str, int], seed: int) -> None:
        loop = asyncio.get_running_loop()
        clock, jitter = LinkClock(loop), random.Random(seed)
        self._link = link
        self._listener = listener
        self._parts = LinkParts(
            loop=loop,
            clock=clock,
            up=Lane(clock, link, link.up_bits_per_s, jitter),
            down=Lane(clock, link, link.down_bits_per_s, jitter),
            one_way_delay_s=link.one_way_delay_s,
            target=target,
        )
        self._open: set[Connection] = set()
        self._total = 0
        self._closed_up: Counter[str] = Counter()
        self._closed_down: Counter[str] = Counter()
        self._restore_timer: asyncio.TimerHandle | None = None
        self._accept_timer: asyncio.TimerHandle | None = None
        self._resume_accepting()

    def reset(self) -> None:
        for connection in list(self._open):
            connection.abort()

    def set_down(self, down: bool) -> None:
        if self._restore_timer is not None:
            self._restore_timer.cancel()
            self._restore_timer = None
        if down:
            self._parts.clock.stop()
        else:
            self._parts.clock.resume()

    def outage(self, seconds: float) -> None:
        self.set_down(True)
        self._restore_timer = self._parts.loop.call_later(seconds, self.set_down, False)

    def set_rate(self, up_bits_per_s: float, down_bits_per_s: float) -> None:
        self._parts.up.bits_per_s = up_bits_per_s
        self._parts.down.bits_per_s = down_bits_per_s

    def set_delay(self, one_way_delay_s: float) -> None:
        self._parts.up.set_delay(one_way_delay_s)
        self._parts.down.set_delay(one_way_delay_s)
        self._parts = replace(self._parts, one_way_delay_s=one_way_delay_s)

    def stats(self) -> RelayStats:
        up, down = Counter(self._closed_up), Counter(self._closed_down)
        for connection in self._open:
            up[connection.purpose] += connection.up_bytes
            down[connection.purpose] += connection.down_bytes
        return RelayStats(
            name=self._link.name,
            up_bytes=up.total(),
            down_bytes=down.total(),
            up_by_purpose={purpose: up[purpose] for purpose in PURPOSES},
            down_by_purpose={purpose: down[purpose] for purpose in PURPOSES},
            connections_open=len(self._open),
            connections_total=self._total,
            is_down=self._parts.clock.stopped,
        )

    def close(self) -> None:
        if self._accept_timer is not None:
            self._accept_timer.cancel()
        self._parts.loop.remove_reader(self._listener)
        self._listener.close()
        self.set_down(False)
        self.reset()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client left before it was accepted
            return
        except OSError:  # out of file descriptors: the client waits in the backlog
            self._parts.loop.remove_reader(self._listener)
            self._accept_timer = self._parts.loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)
            return
        self._total += 1
        self._open.add(Connection(self._parts, client, self._on_closed))

    def _resume_accepting(self) -> None:
        self._parts.loop.add_reader(self._listener, self._accept)

    def _on_closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._closed_up[connection.purpose] += connection.up_bytes
        self._closed_down[connection.purpose] += connection.down_bytes


class LinkRelay:
    """Listens on a free port of 127.0.0.1 and relays to `target` (an IPv4 address and a port) over an emulated link.

    Runs in a thread of its own between `start` and `stop`; every method may be called from any thread. Faults:
    `reset`, `outage`, `set_down`, `set_rate`, `set_delay`. `seed` decides the jitter.
    """

    def __init__(self, link: Link, target: tuple[str, int], *, seed: int = 0) -> None:
        self.link = link
        self._target = target
        self._seed = seed
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._inner: RelayLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._address: tuple[str, int] | None = None
        self._last: RelayStats | None = None

    def start(self) -> Self:
        """Raises OSError when no port can be opened."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
        self._listener, self._address = listener, listener.getsockname()[:2]
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=f"relay-{self.link.name}", daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def stop(self) -> RelayStats:
        """Reset what is open, close the port, end the thread; the last numbers."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            raise UsageError(f"relay {self.link.name} is not running")
        if thread.is_alive():
            self._last = self._call(self._shut)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
        return self.stats()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> tuple[str, int]:
        """Where to connect."""
        if self._address is None:
            raise UsageError(f"relay {self.link.name} was not started")
        return self._address

    def reset(self) -> None:
        """Reset (RST) every open connection at both ends; new ones work."""
        self._call(lambda inner: inner.reset())

    def set_down(self, down: bool) -> None:
        """Stop the link: nothing passes, open connections stall, new ones hang. False restores it; nothing is lost."""
        self._call(lambda inner: inner.set_down(down))

    def outage(self, seconds: float) -> None:
        """Down now, up again after `seconds`; a later call replaces the end of an earlier one."""
        self._call(lambda inner: inner.outage(seconds))

    def set_rate(self, up_bits_per_s: float, down_bits_per_s: float) -> None:
        """Change the rates; what is in flight keeps its time."""
        check_rate(self.link.name, up_bits_per_s)
        check_rate(self.link.name, down_bits_per_s)
        self._call(lambda inner: inner.set_rate(up_bits_per_s, down_bits_per_s))

    def set_delay(self, one_way_delay_s: float) -> None:
        """Change the delay of each way; what is in flight keeps its time."""
        replace(self.link, one_way_delay_s=one_way_delay_s)  # refuses what no link has
        self._call(lambda inner: inner.set_delay(one_way_delay_s))

    def stats(self) -> RelayStats:
        """The numbers so far; after `stop` the last ones."""
        return self._last if self._last is not None else self._call(lambda inner: inner.stats())

    # ---- the thread ----

    def _run(self, ready: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        self._loop = loop
        try:
            loop.run_until_complete(self._open())
            loop.call_soon(ready.set)
            loop.run_forever()
        finally:
            ready.set()
            loop.close()

    async def _open(self) -> None:
        if self._listener is not None:
            self._inner = RelayLoop(self.link, self._listener, self._target, self._seed)

    def _shut(self, inner: RelayLoop) -> RelayStats:
        inner.close()
        return inner.stats()

    def _call(self, action: Callable[[RelayLoop], T]) -> T:
        """Run in the relay's loop and wait for the result."""
        loop, inner = self._loop, self._inner
        if loop is None or inner is None or loop.is_closed():
            raise UsageError(f"relay {self.link.name} is not running")

        async def act() -> T:
            return action(inner)

        return asyncio.run_coroutine_threadsafe(act(), loop).result()

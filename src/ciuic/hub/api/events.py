"""Telling coroutines that something changed, from any thread, and streaming what changed to people."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

ALIVE_S = 10.0
"""A followed stream that has nothing to say sends an empty line so often."""

EVENTS = "events"
ANYTHING = "anything"
SHARDS = "shards"
"""What shards must know has changed."""


def node_topic(node_id: str) -> str:
    return f"node/{node_id}"


def run_topic(run_id: str) -> str:
    return f"run/{run_id}"


def logs_topic(run_id: str) -> str:
    return f"logs/{run_id}"


class Board:
    """Counts changes per topic and wakes those who wait for the next one.

    Read `seen`, look at the state, then `wait` with what was seen: a change in between is never missed.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._counts: Counter[str] = Counter()
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self.is_closed = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop in which everybody waits."""
        self._loop = loop

    def notify(self, *topics: str) -> None:
        """Something changed. From any thread; before `attach` and after the loop's end nobody is waiting."""
        if self._loop is None or self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(self._count, topics)
        except RuntimeError:  # closed between the question and the call
            return

    def seen(self, topic: str) -> int:
        """How many changes there have been."""
        return self._counts[topic]

    async def wait(self, topic: str, seen: int, timeout_s: float) -> bool:
        """True as soon as there has been another change; False after `timeout_s`, and at once when the hub stops."""
        if self._counts[topic] != seen:
            return True
        if self.is_closed or timeout_s <= 0:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(topic, set())
        waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            return False
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop(topic, None)
        return self._counts[topic] != seen

    async def pause(self, seconds: float) -> None:
        """Sleep, but not longer than the hub lives."""
        await self.wait("(nothing is ever told here)", 0, seconds)

    def close(self) -> None:
        """The hub stops: let everybody go (in the loop's thread)."""
        self.is_closed = True
        for topic in list(self._waiters):
            self._release(topic)

    def _count(self, topics: Sequence[str]) -> None:
        for topic in topics:
            self._counts[topic] += 1
            self._release(topic)

    def _release(self, topic: str) -> None:
        for waiter in self._waiters.get(topic, ()):
            if not waiter.done():
                waiter.set_result(None)


class Numbered(Protocol):
    """A row with an ascending id."""

    @property
    def id(self) -> int: ...


async def follow(
    fetch: Callable[[int], Awaitable[Sequence[Numbered]]],
    after: int,
    board: Board,
    topic: str,
    is_over: Callable[[], Awaitable[bool]],
) -> AsyncIterator[bytes]:
    """NDJSON lines with ids beyond `after`, and those still to come until `is_over` (asked before each fetch)."""
    while True:
        seen, over = board.seen(topic), await is_over()
        rows = await fetch(after)
        if rows:
            after = rows[-1].id
            yield b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
            continue
        if over or board.is_closed:
            return
        if not await board.wait(topic, seen, ALIVE_S) and not board.is_closed:
            yield b"\n"

"""Endpoints of the rendezvous: a place in a group, signs of life, and the group's store. For nodes and operators.

Everything here is in memory and takes microseconds, so it runs on the event loop itself, one call after the other.
"""

import asyncio
import secrets
import time
import zlib
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from ciuic.hub.access.auth import NODES, OPERATORS
from ciuic.hub.api.endpoints import MIB, Call, Desk, reply
from ciuic.hub.meeting.rendezvous import Rendezvous
from ciuic.net.messages import Ok, decode
from ciuic.net.store_messages import GroupAsk, GroupHold, GroupLeave, GroupNews, GroupPlace, StoreCall, StoreReply

T = TypeVar("T")

LONGEST_WAIT_S = 30.0
CALL_LIMIT_BYTES = 32 * MIB
"""A full store, written in one call, in base64."""
_TOPICS = 64


class StoreApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: Desk, rendezvous: Rendezvous | None = None) -> None:
        self._desk = desk
        self._board = desk.hub.board
        self._rendezvous = rendezvous or Rendezvous(new_tag=lambda: secrets.token_hex(8))

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        route, group, who = self._desk.route, "/v1/rendezvous/{job}/{group}", NODES | OPERATORS
        return [
            route("POST", f"{group}/ask", self.ask, roles=who),
            route("POST", f"{group}/hold", self.hold, roles=who),
            route("POST", f"{group}/leave", self.leave, roles=who),
            route("POST", f"{group}/store", self.store, roles=who, limit_bytes=CALL_LIMIT_BYTES),
        ]

    async def ask(self, call: Call) -> Response:
        """A place in the next generation; held while there is none."""
        ask = decode(call.body, GroupAsk)
        name = _name(call)

        def attempt() -> GroupPlace | None:
            place = self._rendezvous.ask(time.monotonic(), name, call.name, ask)
            return place if place.status == "formed" else None

        place = await self._held(call, name, ask.member, ask.wait_s, attempt)
        return reply(place or self._rendezvous.ask(time.monotonic(), name, call.name, ask))

    async def hold(self, call: Call) -> Response:
        """A sign of life; held while nothing changes."""
        hold = decode(call.body, GroupHold)
        name = _name(call)

        def attempt() -> GroupNews | None:
            news = self._rendezvous.hold(time.monotonic(), name, call.name, hold)
            return news if news.revision != hold.seen or not news.is_current else None

        news = await self._held(call, name, hold.member, hold.wait_s, attempt)
        return reply(news or self._rendezvous.hold(time.monotonic(), name, call.name, hold))

    async def leave(self, call: Call) -> Response:
        leave = decode(call.body, GroupLeave)
        self._rendezvous.leave(time.monotonic(), _name(call), call.name, leave)
        self._rendezvous.settle(time.monotonic(), _name(call))
        self._board.notify(_topic(_name(call)))
        return reply(Ok())

    async def store(self, call: Call) -> Response:
        """One operation; one that needs keys is held while they are missing."""
        asked = decode(call.body, StoreCall)
        name = _name(call)
        last = StoreReply()

        def attempt() -> StoreReply | None:
            nonlocal last
            last = self._rendezvous.call(time.monotonic(), name, call.name, asked)
            return last if last.status == "done" else None

        return reply(await self._held(call, name, asked.member, asked.wait_s, attempt) or last)

    async def _held(
        self, call: Call, name: str, member: str, wait_s: float, attempt: Callable[[], T | None]
    ) -> T | None:
        """What `attempt` gives as soon as it gives something; None after `wait_s`.

        Raises ClientDisconnect when the caller's connection ends meanwhile.
        """
        board, topic = self._board, _topic(name)
        until_s = time.monotonic() + min(LONGEST_WAIT_S, max(0.0, wait_s))
        gone: asyncio.Task[object] | None = None
        try:
            while True:
                seen, before = board.seen(topic), self._rendezvous.changes(name)
                result = attempt()
                if self._rendezvous.changes(name) != before:
                    board.notify(topic)
                left_s = until_s - time.monotonic()
                if result is not None or left_s <= 0 or board.is_closed:
                    return result
                gone = gone or asyncio.ensure_future(_gone(call))
                pause_s = min(left_s, self._rendezvous.wait_s(time.monotonic(), name) + 0.01)
                change = asyncio.ensure_future(board.wait(topic, seen, pause_s))
                await asyncio.wait({gone, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if gone.done():
                    self._rendezvous.lost(time.monotonic(), name, member)
                    board.notify(topic)
                    raise ClientDisconnect
        finally:
            if gone is not None:
                gone.cancel()


async def _gone(call: Call) -> None:
    """Until the caller's connection has ended (its body was read before)."""
    while (await call.request.receive())["type"] != "http.disconnect":
        continue


def _name(call: Call) -> str:
    return f"{call.path('job')}/{call.path('group')}"


def _topic(name: str) -> str:
    """One of a few: the board keeps a count per topic for ever, and names come from outside."""
    return f"rendezvous/{zlib.crc32(name.encode()) % _TOPICS}"

"""Waiting for changes: none is missed, everybody is released, in order, from any thread."""

import asyncio
import threading
from collections.abc import Sequence

import msgspec

from ciuic.hub.api.events import Board, follow


class Row(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    text: str = ""


def test_a_change_between_looking_and_waiting_is_not_missed() -> None:
    async def story() -> bool:
        board = Board()
        board.attach(asyncio.get_running_loop())
        seen = board.seen("x")
        board.notify("x")
        return await board.wait("x", seen, 10.0)

    assert asyncio.run(story())


def test_waiting_ends_after_its_time_and_leaves_nothing_behind() -> None:
    async def story() -> tuple[bool, int]:
        board = Board()
        board.attach(asyncio.get_running_loop())
        return await board.wait("x", 0, 0.01), len(board._waiters)

    assert asyncio.run(story()) == (False, 0)


def test_all_who_wait_for_a_topic_are_woken_and_only_they() -> None:
    async def story() -> list[bool]:
        board = Board()
        board.attach(asyncio.get_running_loop())
        waits = [asyncio.create_task(board.wait(topic, 0, 0.3)) for topic in ("x", "x", "y")]
        await asyncio.sleep(0)
        threading.Thread(target=board.notify, args=("x", "z")).start()
        return list(await asyncio.gather(*waits))

    assert asyncio.run(story()) == [True, True, False]


def test_closing_releases_everybody_at_once_and_nobody_waits_afterwards() -> None:
    async def story() -> float:
        board = Board()
        loop = asyncio.get_running_loop()
        board.attach(loop)
        began = loop.time()
        waits = [asyncio.create_task(board.wait("x", 0, 60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        board.close()
        await asyncio.gather(*waits)
        await board.wait("x", 0, 60.0)
        return loop.time() - began

    assert asyncio.run(story()) < 5.0


def test_notifying_without_a_loop_or_after_its_end_is_no_error() -> None:
    board = Board()
    board.notify("x")

    async def story() -> None:
        board.attach(asyncio.get_running_loop())

    asyncio.run(story())
    board.notify("x")


def test_follow_sends_what_is_there_then_what_comes_then_ends() -> None:
    rows = [Row(id=1), Row(id=2)]

    async def story() -> list[bytes]:
        board = Board()
        board.attach(asyncio.get_running_loop())

        async def fetch(after: int) -> Sequence[Row]:
            return [row for row in rows if row.id > after][:1]

        received: list[bytes] = []

        async def is_over() -> bool:
            return len(rows) == 3

        async for piece in follow(fetch, 0, board, "x", is_over):
            received.append(piece)
            if len(received) == 2:
                rows.append(Row(id=3))
                board.notify("x")
        return received

    assert [msgspec.json.decode(piece)["id"] for piece in asyncio.run(story())] == [1, 2, 3]


def test_a_line_written_while_the_end_is_noticed_is_still_sent() -> None:
    rows: list[Row] = []

    async def story() -> list[bytes]:
        board = Board()
        board.attach(asyncio.get_running_loop())

        async def fetch(after: int) -> Sequence[Row]:
            return [row for row in rows if row.id > after]

        async def is_over() -> bool:
            if not rows:
                rows.append(Row(id=1, text="last words"))
            return True

        return [piece async for piece in follow(fetch, 0, board, "x", is_over)]

    assert asyncio.run(story()) == [b'{"id":1,"text":"last words"}\n']

"""A joiner's download gives way to what the other nodes wait for.

Entries are small and urgent, a snapshot is large and is not. So before each piece of a snapshot its sender looks
whether the kernel still holds bytes of an entry that were not acknowledged yet, and waits a little if so. It is never
stopped: a piece waits at most `LONGEST_WAIT_S`.
"""

import asyncio
import fcntl
import struct
import termios
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from ciuic.errors import NotFoundError, StorageError
from ciuic.net.chunks import LARGE_BYTES, ChunkList, chunk_size, strong_digest
from ciuic.net.messages import FragmentState
from ciuic.net.sockets import keep_unsent_small

SOCKET = "ciuic.socket"
"""Key of a request's scope: the connection's socket (hub.protocol)."""
LONGEST_WAIT_S = 1.0
LOOK_EVERY_S = 0.01
FRESH_S = 0.1
"""An entry that is about to be sent counts for so long, whatever the kernel says."""
FORGET_S = 30.0
LISTS_KEPT = 32
LISTED_AT_ONCE_BYTES = 256 << 20
"""A larger snapshot takes long to read: its list is not waited for by an answer that does not need it."""


class Courtesy:
    """What is urgent on one port. Confined to its event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._urgent: dict[int, tuple[Any, float]] = {}
        """Sockets by file number, and since when."""

    def urgent(self, scope: Scope) -> None:
        """The answer to this request is what a node waits for."""
        sock = scope.get(SOCKET)
        if sock is not None and sock.fileno() >= 0:
            self._urgent[sock.fileno()] = (sock, self._clock())

    @property
    def is_busy(self) -> bool:
        """Something urgent is not sent yet."""
        now_s = self._clock()
        for number, (sock, since_s) in list(self._urgent.items()):
            age_s = now_s - since_s
            if age_s > FORGET_S or (age_s > FRESH_S and unsent_bytes(sock) == 0):
                del self._urgent[number]
        return bool(self._urgent)

    async def turn(self) -> None:
        """Before a piece of a snapshot."""
        until_s = self._clock() + LONGEST_WAIT_S
        while self.is_busy and self._clock() < until_s:  # noqa: ASYNC110 - the kernel tells nobody when it has sent
            await asyncio.sleep(LOOK_EVERY_S)


def unsent_bytes(sock: Any) -> int:
    """What the kernel holds of a connection: not sent, or not acknowledged. 0 when it is closed."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    except (OSError, ValueError):
        return 0


class SnapshotResponse(FileResponse):
    """A file, or the part of it that Range asks for, in pieces that keep TLS busy and give way."""

    chunk_size = 256 * 1024

    def __init__(self, path: Path, courtesy: Courtesy) -> None:
        super().__init__(path, media_type="application/octet-stream")
        self._courtesy = courtesy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sock = scope.get(SOCKET)
        if sock is not None:
            keep_unsent_small(sock)

        async def giving_way(message: Message) -> None:
            if message["type"] == "http.response.body":
                await self._courtesy.turn()
            await send(message)

        await super().__call__(scope, receive, giving_way)


class ChunkLists:
    """What snapshot files consist of; each is read once. Thread-safe: at worst one is read twice."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Path, int, int], ChunkList] = OrderedDict()

    def into(self, state: FragmentState, find: Callable[[], Path]) -> FragmentState:
        """A fragment's state with the list of its snapshot, which `find` gives; as it was when it must be asked for."""
        if state.url or not LARGE_BYTES <= state.snapshot_bytes <= LISTED_AT_ONCE_BYTES:
            return state
        try:
            found = self.of(find())
        except (NotFoundError, StorageError, OSError):  # replaced this moment: the joiner hears of it when it asks
            return state
        if found.total_bytes != state.snapshot_bytes:
            return state
        return replace(state, chunk_bytes=found.chunk_bytes, chunks=found.digests)

    def of(self, path: Path) -> ChunkList:
        """Takes about a second per GB the first time. Raises NotFoundError when the file has just been replaced."""
        try:
            status = path.stat()
            key = (path, status.st_mtime_ns, status.st_size)
            if key not in self._known:
                self._known[key] = _read_list(path, status.st_size)
                while len(self._known) > LISTS_KEPT:
                    self._known.popitem(last=False)
            return self._known[key]
        except (FileNotFoundError, KeyError) as error:
            raise NotFoundError("this snapshot was replaced by a newer one", next="attach again") from error


def _read_list(path: Path, total_bytes: int) -> ChunkList:
    size = chunk_size(total_bytes)
    digests: list[str] = []
    with path.open("rb") as file:
        while chunk := file.read(size):
            digests.append(strong_digest(chunk))
    return ChunkList(total_bytes=total_bytes, chunk_bytes=size, digests="".join(digests))

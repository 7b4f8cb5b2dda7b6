"""A door into a namespace: a port of 127.0.0.1 here is a port of a host there.

So that a browser, `ciuic run` or anything else of this machine reaches a hub that listens in a namespace. Nothing is
emulated on this way.
"""

import asyncio
import contextlib
import socket
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from ciuic.errors import RunFailedError

_CHUNK_BYTES = 256 * 1024
_START_S = 10.0


class Gateway:
    """Between `start` and `stop` (or in a `with` block) `address` leads to `target`.

    `inside` is the context in which a thread's sockets belong to the host, as `Sites.inside` gives it.
    """

    def __init__(self, inside: AbstractContextManager[None], target: tuple[str, int]) -> None:
        self._inside = inside
        self._target = target
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: asyncio.Event | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))  # opened here: it stays a socket of this machine
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, name="lab-gateway", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(_START_S) or self._loop is None:
            self._listener.close()
            raise RunFailedError("the way into the lab's hub could not be opened")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and self._done is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._inside:
                asyncio.run(self._serve())
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accepted, sock=self._listener)
        self._ready.set()
        await self._done.wait()
        server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)
        with contextlib.suppress(OSError), contextlib.closing(writer):  # the other side is away: so is this one
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            with contextlib.closing(far_writer):
                await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the end of file, which is passed on."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()

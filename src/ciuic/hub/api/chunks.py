"""The endpoint that takes large bodies in chunks, the same on the hub and on shards; see net/chunks for the format.

A request may carry any of the chunks, also none. Each is checked against the announced digest and written to disk; one
chunk per connection is in memory. Whichever request completes the body hands it to the ledger, exactly as a body that
came in one piece, and gets its answer; so does whoever asks later.
"""

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ciuic.errors import CiuicError, FrameError, ProtocolError, StorageError
from ciuic.hub.access.auth import NODES
from ciuic.hub.api.endpoints import LEAST_BYTES_PER_S, NO_PROGRESS_S, Call, Front, reply
from ciuic.hub.api.spool import Spool, Upload
from ciuic.ledger.files import Spooled
from ciuic.net.chunks import MANIFEST_LIMIT_BYTES, NUMBER, ChunksReply, Manifest, decode_manifest
from ciuic.net.messages import PushReply

P = ParamSpec("P")
T = TypeVar("T")
WRITERS = 2
"""Threads that check and write chunks: the disk is not faster with more."""


class Taker(Protocol):
    """Whose bodies they are: the hub's runs, or a shard's."""

    async def most_bytes(self, call: Call) -> int:
        """How large a body may be. Raises what the caller gets when it may not send any."""
        ...

    async def expect(self, call: Call, manifest: Manifest) -> None:
        """Whether this body is wanted here. Raises what the caller gets when it is not."""
        ...

    async def take(self, call: Call, manifest: Manifest, frame: bytes, spooled: Spooled) -> PushReply | None:
        """A whole body, as if it had come in one piece. `spooled`: the file that it is in."""
        ...


class ChunkApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, front: Front, spool: Spool, taker: Taker) -> None:
        self._front, self._spool, self._taker = front, spool, taker
        self._writers = ThreadPoolExecutor(WRITERS, "hub-spool")
        self._admitting: weakref.WeakKeyDictionary[Upload, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._sweeping: asyncio.TimerHandle | None = None

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        return [self._front.route("POST", "/v1/runs/{run}/chunks", self.post, roles=NODES, limit_bytes=0)]

    async def post(self, call: Call) -> Response:
        """Take chunks; answers with the result, or with what is still missing."""
        limit = await self._taker.most_bytes(call)
        incoming = Incoming(call.request)
        manifest = await incoming.manifest(limit)
        await self._taker.expect(call, manifest)
        upload = await self._write(self._spool.open, (call.path("run"), call.name), manifest, limit)
        self._sweep_later()
        try:
            async for index, chunk in incoming.chunks(manifest):
                if upload.result is None:
                    await self._write(upload.store, index, chunk)
            return reply(await self._settled(call, upload))
        finally:
            self._spool.leave(upload)

    async def _settled(self, call: Call, upload: Upload) -> ChunksReply:
        lock = self._admitting.setdefault(upload, asyncio.Lock())
        async with lock:
            if upload.refusal is not None:
                raise upload.refusal
            if upload.result is None and upload.is_whole:
                frame = await self._front.long(upload.read)
                try:
                    push = await self._taker.take(call, upload.manifest, frame, upload)
                except StorageError:  # it is all here, and tried again when the sender asks
                    raise
                except CiuicError as error:
                    upload.refusal = error
                    self._spool.drop(upload)
                    raise
                upload.finish(ChunksReply(done=True, push=push))
        return upload.result or ChunksReply(missing=tuple(upload.missing()))

    async def _write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writers, partial(work, *args, **kwargs))

    def _sweep_later(self) -> None:
        """One timer as long as there are uploads."""
        if self._sweeping is None:
            loop = asyncio.get_running_loop()
            self._sweeping = loop.call_later(self._spool.idle_s, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        if self._spool.sweep():
            self._sweep_later()


class Incoming:
    """The body of one request, taken apart while it arrives."""

    def __init__(self, request: Request) -> None:
        self._stream = request.stream()
        self._rest = memoryview(b"")
        self._total, self._began_s = 0, time.monotonic()

    async def manifest(self, limit_bytes: int) -> Manifest:
        """What the body begins with. Raises FrameError, ProtocolError when nothing comes."""
        size = NUMBER.unpack(await self._exactly(NUMBER.size))[0]
        if size > MANIFEST_LIMIT_BYTES:
            raise FrameError(f"a list of chunks of {size} bytes is not accepted", cause=f"limit {MANIFEST_LIMIT_BYTES}")
        return decode_manifest(await self._exactly(size), limit_bytes)

    async def chunks(self, manifest: Manifest) -> AsyncIterator[tuple[int, memoryview]]:
        """(index, bytes) of each chunk; the bytes hold until the next one is asked for. Raises FrameError."""
        buffer = memoryview(bytearray(min(manifest.chunk_bytes, manifest.total_bytes)))
        number = memoryview(bytearray(NUMBER.size))
        for _ in range(manifest.count + 1):
            if not await self._fill(number):
                return
            index = NUMBER.unpack(number)[0]
            if index >= manifest.count:
                raise FrameError(f"there is no chunk {index}", cause=f"the body has {manifest.count}")
            start, stop = manifest.span(index)
            if await self._fill(buffer[: stop - start]) != stop - start:
                raise FrameError(f"chunk {index} is cut", next="send it again")
            yield index, buffer[: stop - start]
        raise FrameError("the request carries more chunks than the body has")

    async def _exactly(self, size: int) -> bytearray:
        found = bytearray(size)
        if await self._fill(memoryview(found)) != size:
            raise FrameError("the list of chunks is cut", next="send it again")
        return found

    async def _fill(self, target: memoryview) -> int:
        """Bytes that came: fewer than wanted only at the end of the body, or 0 right there. Raises ProtocolError."""
        have = 0
        while have < len(target):
            if not len(self._rest):
                piece = await self._next()
                if piece is None:
                    break
                self._rest = memoryview(piece)
            count = min(len(self._rest), len(target) - have)
            target[have : have + count] = self._rest[:count]
            self._rest = self._rest[count:]
            have += count
        if 0 < have < len(target):
            raise FrameError("the body ends inside a chunk", next="send it again")
        return have

    async def _next(self) -> bytes | None:
        try:
            async with asyncio.timeout(NO_PROGRESS_S):
                piece = await anext(self._stream, None)
        except TimeoutError:
            raise ProtocolError("the body stopped", cause=f"nothing came for {NO_PROGRESS_S:.0f} s") from None
        self._total += len(piece or b"")
        if self._total < LEAST_BYTES_PER_S * (time.monotonic() - self._began_s - NO_PROGRESS_S):
            raise ProtocolError(f"the body comes too slowly: {self._total} bytes so far", next="check the network")
        return piece

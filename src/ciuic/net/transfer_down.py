"""Fetching a large file: ranges over several connections, from several sources, each chunk checked on arrival.

The hub says what the file consists of (net.chunks.ChunkList). Every connection takes runs of chunks out of a common
queue, long ones first and shorter ones in the end, so that none is left with a long rest. What is there survives any
cut, also the end of this process: the file beside the target holds the chunks in their places, and those that have the
right digest are not fetched again. A source that is not the hub and fails, or sends other bytes, is not asked again.
"""

import http.client
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ciuic.errors import CiuicError, DigestMismatchError, ProtocolError, StorageError, UnreachableError
from ciuic.net.chunks import ChunkList
from ciuic.net.exchange import Exchange
from ciuic.net.transfer import Fan, was_interrupted

FRUITLESS_ATTEMPTS = 5
"""So many passes in a row without one new chunk, and it is given up."""
RUNS_PER_LANE = 2
COLD_LANES = 8
"""A joiner's connections are new, and the windows of eight open sooner than those of four."""
LEAST_RUN = 4
"""Chunks of a run, as long as there are so many: every request costs a round trip in which its connection idles."""
SOURCES_FIRST_S = 3.0
"""So long other sources are alone; then the hub helps, for they may be slow."""
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_PAUSE_S = 0.2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One connection to one source."""

    exchange: Exchange
    is_hub: bool
    path: str


@dataclass(kw_only=True)
class Source:
    """Somebody else who holds the file, and how it went with it."""

    exchange: Exchange
    path: str
    """Of the file there."""
    taken_bytes: int = 0
    problem: CiuicError | None = None
    """Then it is not asked again."""


class PartFile:
    """The file while it is not whole. Thread-safe."""

    def __init__(self, path: Path, chunks: ChunkList) -> None:
        """Take up what is there. Raises StorageError."""
        self.path, self.chunks = path, chunks
        self._there = bytearray(chunks.count)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            had = path.stat().st_size if path.exists() else 0
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._fd, chunks.total_bytes)
        except OSError as error:
            raise _cannot_write(path, error) from error
        if had == chunks.total_bytes:
            for index in range(chunks.count):
                start, stop = chunks.span(index)
                self._there[index] = chunks.holds(index, os.pread(self._fd, stop - start, start))

    def missing(self) -> list[int]:
        """Chunks that are not there."""
        return [index for index, there in enumerate(self._there) if not there]

    def put(self, index: int, chunk: memoryview) -> None:
        """Keep a chunk. Raises DigestMismatchError when it is another one, StorageError."""
        if not self.chunks.holds(index, chunk):
            raise DigestMismatchError(
                f"chunk {index} of {self.path.name} is not the one that the hub announced",
                cause="it was damaged, or its sender does not have this version",
                next="it is fetched again",
            )
        start, _ = self.chunks.span(index)
        try:
            done = 0
            while done < len(chunk):
                done += os.pwrite(self._fd, chunk[done:], start + done)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._there[index] = 1

    def close(self) -> None:
        os.close(self._fd)


def fetch_file(fan: Fan, path: str, target: Path, chunks: ChunkList, sources: Sequence[Source] = ()) -> None:
    """GET `path` into `target`, from `sources` and from the hub (whose connections `fan` has).

    The sources begin alone; the hub helps when they take longer than a moment, or fail.

    Raises UnreachableError after five passes without one new chunk (call again: what is there is kept), StorageError,
    and what the hub answers; DigestMismatchError when it is the hub that sends other bytes.
    """
    part = PartFile(target.with_name(target.name + ".chunks"), chunks)
    fruitless = 0
    with closing(part):
        while missing := part.missing():
            usable = [source for source in sources if source.problem is None]
            lanes = _lanes(fan, path, usable, len(missing))
            fetching = _Fetching(part, missing, len(lanes), usable)
            fan.run([partial(fetching.over, lane) for lane in lanes])
            left = part.missing()
            fruitless = 0 if len(left) < len(missing) else fruitless + 1
            problem = fetching.problem
            if problem is not None and (was_interrupted(problem) or not isinstance(problem, UnreachableError)):
                raise problem
            if fruitless >= FRUITLESS_ATTEMPTS:
                raise problem or UnreachableError(f"{path} does not come", cause=f"{len(left)} chunks are missing")
            if left and fruitless:
                time.sleep(_PAUSE_S * 2**fruitless)
    part.path.replace(target)


def _lanes(fan: Fan, path: str, sources: Sequence[Source], chunks: int) -> list[Lane]:
    """With other sources one connection to the hub is enough: it has others to serve."""
    hub = fan.lanes(1 if sources else max(min(fan.streams.count, chunks), min(COLD_LANES, chunks // 2)))
    others = [Lane(exchange=source.exchange, is_hub=False, path=source.path) for source in sources]
    return others + [Lane(exchange=x, is_hub=True, path=path) for x in hub]


class _Fetching:
    """One pass over the connections."""

    def __init__(self, part: PartFile, missing: Sequence[int], lanes: int, sources: Sequence[Source]) -> None:
        self._part, self._lanes = part, lanes
        self._sources = {id(source.exchange): source for source in sources}
        self._queue = deque(missing)
        self._lock = threading.Lock()
        self._needs_hub, self._working = threading.Event(), len(sources)
        if not sources:
            self._needs_hub.set()
        self.problem: CiuicError | None = None
        """Of the hub; one that is not about the network counts more."""

    def over(self, lane: Lane) -> None:
        """Fetch over this connection what the queue gives, until it is empty or the connection fails."""
        if lane.is_hub:
            self._needs_hub.wait(SOURCES_FIRST_S)
        try:
            while run := self._next():
                try:
                    self._fetch(lane, run)
                except CiuicError as error:
                    with self._lock:
                        self._queue.extendleft(reversed(run))
                        self._note(lane, error)
                    return
        finally:
            if not lane.is_hub:
                self._ended()

    def _ended(self) -> None:
        """A source has nothing more to do, or has failed: the hub need not wait for the last one."""
        with self._lock:
            self._working -= 1
            if self._working == 0 or self._queue:
                self._needs_hub.set()

    def _note(self, lane: Lane, error: CiuicError) -> None:
        final = not isinstance(error, UnreachableError) or was_interrupted(error)
        if isinstance(error, StorageError) or (final and lane.is_hub):
            self._queue.clear()  # the others stop, too
        if not lane.is_hub and not isinstance(error, StorageError):
            self._sources[id(lane.exchange)].problem = error
        elif self.problem is None or final:
            self.problem = error

    def _next(self) -> list[int]:
        """The next run of chunks that lie one after the other."""
        with self._lock:
            share = -(-len(self._queue) // self._lanes)
            longest = max(min(LEAST_RUN, share), share // RUNS_PER_LANE)
            run: list[int] = []
            while self._queue and len(run) < longest and (not run or self._queue[0] == run[-1] + 1):
                run.append(self._queue.popleft())
            return run

    def _fetch(self, lane: Lane, run: list[int]) -> None:
        """`run` loses each chunk that is there."""
        chunks, exchange = self._part.chunks, lane.exchange
        source = self._sources.get(id(exchange))
        first, end = chunks.span(run[0])[0], chunks.span(run[-1])[1]
        _log.debug("bytes %d to %d: asked", first, end)
        response = exchange.request("GET", lane.path, headers={"Range": f"bytes={first}-{end - 1}"})
        _log.debug("bytes %d to %d: beginning", first, end)
        buffer = memoryview(bytearray(min(chunks.chunk_bytes, chunks.total_bytes)))
        filled = 0

        def sink(piece: bytes) -> None:
            nonlocal filled
            view = memoryview(piece)
            while len(view) and run:
                start, stop = chunks.span(run[0])
                count = min(len(view), stop - start - filled)
                buffer[filled : filled + count] = view[:count]
                filled, view = filled + count, view[count:]
                if filled == stop - start:
                    self._part.put(run[0], buffer[:filled])
                    run.pop(0)
                    if source is not None:
                        source.taken_bytes += filled
                    filled = 0

        try:
            _check_range(response, first, end, chunks.total_bytes)
        except ProtocolError:
            exchange.close()
            raise
        exchange.drain(response, sink, end - first)
        _log.debug("bytes %d to %d: here", first, end)


def _check_range(response: http.client.HTTPResponse, first: int, end: int, total: int) -> None:
    """Raises ProtocolError when this is another part than was asked for, or of another file."""
    match = CONTENT_RANGE.fullmatch(response.getheader("Content-Range", ""))
    whole = response.status == 200 and (first, end) == (0, total) and response.length in (None, total)
    if whole or (match and tuple(map(int, match.groups())) == (first, end - 1, total)):
        return
    raise ProtocolError(
        f"bytes {first} to {end} of {total} were asked for, {response.getheader('Content-Range', 'others')} came",
        next="ask the hub for the current snapshot again",
    )


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written", cause=str(error), next="make room and start again")

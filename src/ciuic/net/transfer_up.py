"""Sending a large body: as chunks over several connections at once, without waiting for an answer in between.

Nothing is announced first: the first request on each connection carries the list of chunks and as many of them as that
connection manages, one after the other out of a common queue. The hub answers when a connection has nothing more to
send, and with the result when the last chunk is there. After a cut the hub is asked what is missing, and only that is
sent. No byte of the body is copied.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ciuic.errors import CiuicError, ProtocolError, UnreachableError
from ciuic.net.chunks import NUMBER, Buffer, ChunksReply, Manifest, encode_manifest, from_ranges
from ciuic.net.exchange import Exchange
from ciuic.net.messages import decode
from ciuic.net.transfer import Fan, was_interrupted

T = TypeVar("T")
REPLY_LIMIT_BYTES = 4 * 1024 * 1024
PIECE_BYTES = 128 * 1024
"""What is handed to a connection at once, so that its time-out measures progress (at 30 s: 35 kbit/s)."""


class Uploader:
    """Uploads of one thread to one address."""

    def __init__(self, fan: Fan) -> None:
        self._fan = fan
        self._begun = ""
        """The upload whose chunks the other side may have in part."""

    def send(self, path: str, body: Buffer, manifest: Manifest) -> ChunksReply:
        """POST a body; returns when the other side has taken it as a whole.

        Goes on by itself after cuts as long as something arrives in between. Raises UnreachableError (call again with
        the same body: only what is missing is sent) and what the other side answers.
        """
        view = memoryview(body).cast("B")
        missing = None if manifest.id == self._begun else list(range(manifest.count))
        self._begun = manifest.id
        fewest, problem = manifest.count + 1, None
        while True:
            if missing is None:
                reply = self._ask(path, manifest)
                if reply.done:
                    return reply
                missing = from_ranges(reply.missing, manifest.count)
                if len(missing) >= fewest or not missing:
                    raise problem or ProtocolError("the hub does not take what it says is missing")
                fewest = len(missing)
            sending = self._send(path, view, manifest, missing)
            if sending.reply is not None:
                return sending.reply
            problem, missing = sending.problem, None
            if problem is not None and (was_interrupted(problem) or not isinstance(problem, UnreachableError)):
                raise problem

    def _ask(self, path: str, manifest: Manifest) -> ChunksReply:
        lane = self._fan.lanes(1)[0]
        response = lane.request("POST", path, encode_manifest(manifest), {"Content-Type": "application/octet-stream"})
        return decode(lane.read(response, REPLY_LIMIT_BYTES), ChunksReply)

    def _send(self, path: str, view: memoryview, manifest: Manifest, missing: list[int]) -> "_Sending":
        lanes = self._fan.lanes(min(self._fan.streams.count, len(missing)))
        sending = _Sending(path, view, manifest, missing)
        size_bytes = sum(stop - start for start, stop in map(manifest.span, missing))
        began_s = self._fan.begin(lanes, size_bytes)
        self._fan.run([lambda lane=lane: sending.over(lane) for lane in lanes])
        if sending.reply is not None:
            self._fan.end(lanes, began_s, size_bytes)
        return sending


class _Sending:
    """One pass over the connections."""

    def __init__(self, path: str, view: memoryview, manifest: Manifest, missing: Sequence[int]) -> None:
        self._path, self._view, self._manifest = path, view, manifest
        self._queue = deque(missing)
        self._lock = threading.Lock()
        self.reply: ChunksReply | None = None
        self.problem: CiuicError | None = None
        """The first one; one that is not about the network counts more."""

    def over(self, lane: Exchange) -> None:
        """Send over this connection what the queue gives."""
        first = self._next()
        if first is None:
            return
        try:
            reply = decode(lane.read(lane.stream(self._path, self._pieces(first)), REPLY_LIMIT_BYTES), ChunksReply)
        except CiuicError as error:
            self._note(error)
            return
        if reply.done:
            self.reply = reply

    def _note(self, error: CiuicError) -> None:
        with self._lock:
            final = not isinstance(error, UnreachableError) or was_interrupted(error)
            if self.problem is None or final:
                self.problem = error
            if final:
                self._queue.clear()

    def _next(self) -> int | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def _pieces(self, index: int | None) -> Iterator[bytes | memoryview]:
        """The request's body as HTTP chunks: the manifest, then one per chunk of ours."""
        head = encode_manifest(self._manifest)
        lead = f"{len(head):x}\r\n".encode() + head
        while index is not None:
            start, stop = self._manifest.span(index)
            yield lead + f"\r\n{NUMBER.size + stop - start:x}\r\n".encode() + NUMBER.pack(index)
            for at in range(start, stop, PIECE_BYTES):
                yield self._view[at : min(stop, at + PIECE_BYTES)]
            lead, index = b"", self._next()
        yield lead + b"\r\n0\r\n\r\n"

"""The client that agents, workers and operators use to speak to the hub: HTTP/1.1 over pinned TLS, outbound only.

Time-outs mean "no progress", never "too long in total". A request that may have reached the hub is repeated only when
a kept-alive connection died before a single byte of the answer; every message of the protocol is safe to repeat
(pushes by sequence, leases by request id, submissions by submit token).
"""

import http.client
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ciuic.errors import (
    CertificateError,
    CiuicError,
    DigestMismatchError,
    ProtocolError,
    StorageError,
    TokenError,
    UnreachableError,
)
from ciuic.net.chunks import CHUNK_BYTES, LARGE_BYTES, ChunkList, list_in, manifest_of
from ciuic.net.exchange import Body, Exchange
from ciuic.net.messages import FragmentState, JoinReply, JoinRequest, Ok, PushReply, decode, encode
from ciuic.net.peer_messages import PEER_SNAPSHOT, SourceOutcome
from ciuic.net.renewed import RenewableContext
from ciuic.net.sockets import tcp_facts
from ciuic.net.tls import Purpose, check_issued, new_key_and_csr, pem_fingerprint, unverified_context
from ciuic.net.tokens import JoinToken, parse_token
from ciuic.net.transfer import Fan
from ciuic.net.transfer_down import Source, fetch_file
from ciuic.net.transfer_up import Uploader
from ciuic.net.url import parse_hub_url

T = TypeVar("T")

MESSAGE_LIMIT_BYTES = 32 * 1024 * 1024
FRAME_LIMIT_BYTES = 8 * 1024 * 1024 * 1024
LINE_LIMIT_BYTES = 1024 * 1024
_BINARY = {"Content-Type": "application/octet-stream"}
_JSON = {"Content-Type": "application/json"}
SOURCE_SILENCE_S = 5.0
"""Another source that says nothing for so long, also while connecting, is not asked again."""
SPREAD_BYTES = 64 * 1024
FAR_S = 0.03
"""From this round trip on the first packets of a new connection are few."""
_FRUITLESS_ATTEMPTS = 5
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
_log = logging.getLogger(__name__)


class HubClient:
    """One keep-alive connection to the hub, more for large bodies. Confined to one thread, except `interrupt`."""

    def __init__(
        self,
        url: str,
        authority_pem: bytes,
        cert_path: Path | None = None,
        key_path: Path | None = None,
        purpose: Purpose = "operator",
        timeout_s: float = 30.0,
    ) -> None:
        """Does not connect yet. Raises UsageError for a bad address and CertificateError for unusable files."""
        self.address = parse_hub_url(url)
        self._contexts = contexts = RenewableContext(authority_pem, cert_path, key_path, purpose)

        def exchange() -> Exchange:
            made = Exchange(self.address, contexts.context, timeout_s)
            made.renewed = contexts.renewed
            return made

        self._exchange = exchange()
        self.fan = Fan(make=exchange)
        """More connections to the same address, for large bodies; they open when they are needed."""
        self._uploader = Uploader(self.fan)
        self._has_pushed = False

    @property
    def server_time(self) -> float | None:
        """The hub's clock in its latest answer (seconds since 1970, whole seconds); None when it did not say."""
        return self._exchange.server_time

    def open(self, lanes: int = 0) -> None:
        """Connect now, and `lanes` more connections for large bodies beside it.

        What cannot be opened is opened by its first use, which then says why not.
        """
        if lanes:
            self.fan.streams.count = max(self.fan.streams.count, lanes)
            first = threading.Thread(target=self._open_first, name="ciuic-open", daemon=True)
            first.start()
            self.fan.open(lanes)
            first.join()
        else:
            self._open_first()

    def _open_first(self) -> None:
        with suppress(CiuicError):
            self._exchange.open()

    def call(
        self,
        method: str,
        path: str,
        message: msgspec.Struct | None,
        reply_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Send one control message and read the answer. `timeout_s`: the longest silence (for long polls)."""
        body = encode(message) if message is not None else None
        response = self._exchange.request(method, path, body, _JSON if body is not None else {}, timeout_s)
        return decode(self._exchange.read(response, MESSAGE_LIMIT_BYTES), reply_type)

    def send_frame(self, path: str, frame: Body, reply_type: type[T], *, method: str = "POST") -> T:
        """Send a binary frame (POST; PUT for a snapshot) and read the answer."""
        response = self._exchange.request(method, path, frame, _BINARY)
        return decode(self._exchange.read(response, MESSAGE_LIMIT_BYTES), reply_type)

    def push(self, run_path: str, frame: Body, fragment: int) -> PushReply:
        """Send a push: in one request, or a large one as chunks over several connections.

        Repeated with the same frame after UnreachableError it sends only what has not arrived.
        """
        size = memoryview(frame).nbytes
        if size < LARGE_BYTES and not self._is_better_spread(size):
            return self.send_frame(f"{run_path}/push", frame, PushReply)
        streams = self.fan.streams.count
        chunk_bytes = -(-size // streams) if size < streams * CHUNK_BYTES else 0
        reply = self._uploader.send(f"{run_path}/chunks", frame, manifest_of(frame, "push", fragment, chunk_bytes))
        if reply.push is None:
            raise ProtocolError("the hub took a push without an answer", next="use the same version on both sides")
        return reply.push

    def _is_better_spread(self, size_bytes: int) -> bool:
        """Whether a first, small body arrives sooner over several connections: they are open, new, and the way is far.

        A new connection sends a few packets per round trip, then twice as many, and so on.
        """
        is_first, self._has_pushed = not self._has_pushed, True
        if not is_first or size_bytes < SPREAD_BYTES or not self.fan.are_open(self.fan.streams.count):
            return False
        facts = None if self._exchange.sock is None else tcp_facts(self._exchange.sock)
        return facts is not None and facts.sent_bytes < size_bytes and facts.round_trip_s > FAR_S

    def put_version_0(self, run_path: str, frame: Body, fragment: int) -> None:
        """Upload version 0 of a fragment, as `push` does."""
        if memoryview(frame).nbytes < LARGE_BYTES:
            self.send_frame(f"{run_path}/snapshot?fragment={fragment}&version=0", frame, Ok, method="PUT")
        else:
            self._uploader.send(f"{run_path}/chunks", frame, manifest_of(frame, "snapshot", fragment))

    def fetch(
        self,
        path: str,
        sink: Callable[[bytes], object] | None = None,
        *,
        limit_bytes: int = FRAME_LIMIT_BYTES,
        timeout_s: float | None = None,
    ) -> bytes:
        """GET a binary body; b"" for "nothing new" (204). With `sink` each piece goes there and b"" is returned."""
        response = self._exchange.request("GET", path, silence_s=timeout_s)
        if sink is None:
            return self._exchange.read(response, limit_bytes)
        self._exchange.drain(response, sink, limit_bytes)
        return b""

    def fetch_parts(self, paths: Sequence[str], *, limit_bytes: int = FRAME_LIMIT_BYTES) -> list[bytes]:
        """GET several bodies side by side, each over a connection for large bodies. Raises the first failure."""
        found = [b""] * len(paths)
        problems: list[CiuicError] = []

        def fetch(number: int, lane: Exchange) -> None:
            try:
                found[number] = lane.read(lane.request("GET", paths[number]), limit_bytes)
            except CiuicError as error:
                problems.append(error)

        lanes = self.fan.lanes(len(paths))
        self.fan.run([partial(fetch, number, lane) for number, lane in enumerate(lanes)])
        if problems:
            raise problems[0]
        return found

    def download(self, path: str, file: Path, expected_bytes: int) -> None:
        """GET `path` into `file`, going on after cuts where it stopped (also from an earlier process).

        Parts are kept beside `file` until it is whole, so choose a file name that names the content; the content is
        not verified here. Raises UnreachableError after five attempts in a row without one new byte, StorageError
        when the disk refuses.
        """
        if expected_bytes <= 0:
            raise ProtocolError(f"{path} cannot have {expected_bytes} bytes")
        part = file.with_name(file.name + ".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        fruitless = 0
        while (have := _size(part)) != expected_bytes:
            problem: UnreachableError | None = None
            try:
                self._download_rest(path, part, have if have < expected_bytes else 0, expected_bytes)
            except UnreachableError as error:
                problem = error
            fruitless = 0 if have < _size(part) <= expected_bytes else fruitless + 1
            if fruitless >= _FRUITLESS_ATTEMPTS:
                raise problem or UnreachableError(f"{path} ends after {have} of {expected_bytes} bytes")
            if problem:
                time.sleep(backoff_s(fruitless + 1))
        part.replace(file)

    def download_snapshot(self, run_path: str, file: Path, state: FragmentState, fragment: int) -> list[SourceOutcome]:
        """The newest snapshot of a fragment into `file`, verified; first from `state.sources`, nodes that hold it, too.

        A large one comes in parts over several connections; parts stay for the next call after any error. Returns how
        it went with the other sources. Raises what `download` raises, and NotFoundError when a newer one has replaced
        it.
        """
        query, size = f"fragment={fragment}&version={state.snapshot_version}", state.snapshot_bytes
        if size < LARGE_BYTES:
            self.download(f"{run_path}/snapshot?{query}", file, size)
            return []
        chunks = list_in(state) or self.call("GET", f"{run_path}/snapshot/chunks?{query}", None, ChunkList)
        chunks.check(size)
        others = [self._other(url, state.content) for url in state.sources if url and state.content]
        try:
            fetch_file(self.fan, f"{run_path}/snapshot?{query}", file, chunks, others)
        finally:
            for other in others:
                other.exchange.close()
        return [_outcome(other) for other in others]

    def _other(self, url: str, content: str) -> Source:
        """A node that holds it; one that says nothing for a while is not waited for."""
        silence_s = min(SOURCE_SILENCE_S, self._exchange.timeout_s)
        exchange = Exchange(parse_hub_url(url), self._contexts.for_peers(), silence_s)
        return Source(exchange=exchange, path=f"{PEER_SNAPSHOT}/{content}")

    def stream_lines(self, path: str, *, silence_s: float = 60.0) -> Generator[bytes]:
        """GET newline-delimited JSON, line by line while the hub keeps sending.

        Blank lines only show that the hub is alive and are dropped. Raises UnreachableError after `silence_s` without
        a byte. Leaving the iterator early closes the connection.
        """
        response = self._exchange.request("GET", path, silence_s=silence_s)
        ended = False
        try:
            while line := self._exchange.guarded(lambda: response.readline(LINE_LIMIT_BYTES + 1), silence_s):
                if len(line) > LINE_LIMIT_BYTES:
                    raise ProtocolError(f"the hub sent a line of more than {LINE_LIMIT_BYTES} bytes")
                if line.strip():
                    yield line.rstrip(b"\r\n")
            ended = True
        finally:
            if not ended:
                self.close()

    @property
    def sock(self) -> socket.socket | None:
        """The connection's socket, to ask the kernel about it; None while there is no connection."""
        return self._exchange.sock

    def close(self) -> None:
        """Close all connections; the next use opens new ones."""
        self._exchange.close()
        self.fan.close()

    def interrupt(self) -> None:
        """From another thread: end a long poll or transfer that is waiting; its own thread gets UnreachableError."""
        self._exchange.interrupt()
        self.fan.interrupt()

    def _download_rest(self, path: str, part: Path, have: int, expected_bytes: int) -> None:
        response = self._exchange.request("GET", path, headers={"Range": f"bytes={have}-"} if have else {})
        start, total = _placement(response)
        if start > have or total not in (None, expected_bytes):
            self.close()
            raise ProtocolError(
                f"the hub offers {total} bytes (from {start}) for {path}, where {expected_bytes} were announced",
                next="ask the hub for the current snapshot again",
            )
        try:
            with part.open("r+b" if part.exists() else "wb") as out:
                out.truncate(start)
                out.seek(start)
                self._exchange.drain(response, out.write, expected_bytes - start)
        except OSError as error:
            self.close()
            raise StorageError(
                f"{part} cannot be written", cause=str(error), next="make room and start again"
            ) from error


def _outcome(source: Source) -> SourceOutcome:
    url, problem = source.exchange.address.url, source.problem
    if problem is None:
        return SourceOutcome(url=url, taken_bytes=source.taken_bytes)
    kind: Literal["wrong", "away"] = "wrong" if isinstance(problem, DigestMismatchError) else "away"
    return SourceOutcome(url=url, taken_bytes=source.taken_bytes, problem=kind, detail=problem.message[:200])


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _placement(response: http.client.HTTPResponse) -> tuple[int, int | None]:
    """(where the body begins in the file, size of the whole file or None) of an answer that may be partial."""
    if response.status != 206:
        return 0, response.length
    match = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", ""))
    if match is None:
        raise ProtocolError("the hub sent a part without saying which")
    return int(match.group(1)), int(match.group(2))


# ---- joining -------------------------------------------------------------------------------------------------------


def join_network(
    token: str | JoinToken,
    location: str,
    claimed: dict[str, float],
    *,
    url: str | None = None,
    names: Sequence[str] = (),
    timeout_s: float = 30.0,
) -> tuple[str, bytes, bytes, bytes]:
    """Join with a token: (the name the hub gave us, key PEM, certificate PEM, authority PEM).

    The secret is sent only after the server proved, on that same pinned connection, to belong to the token's
    authority. `url` dials another address than the token's (a relay, a second name of the hub). `names`: where
    others dial a shard, or a node that offers it.
    Raises TokenError, CertificateError, UnreachableError.
    """
    parsed = parse_token(token) if isinstance(token, str) else token
    url = url or parsed.url
    authority_pem = _fetch_authority(url, parsed.authority_fingerprint, timeout_s)
    key_pem, csr_pem = new_key_and_csr()
    request = JoinRequest(
        token_id=parsed.id,
        secret=parsed.secret,
        csr_pem=csr_pem.decode("ascii"),
        location=location,
        claimed=claimed,
        names=list(names),
    )
    client = HubClient(url, authority_pem, purpose="control", timeout_s=timeout_s)
    try:
        reply = client.call("POST", "/v1/join", request, JoinReply)
    finally:
        client.close()
    certificate_pem = reply.certificate_pem.encode()
    identity = check_issued(certificate_pem, authority_pem=authority_pem, key_pem=key_pem)
    if identity.name != reply.node_id:
        raise CertificateError(f"the hub calls us {reply.node_id} but issued a certificate for {identity.name}")
    return reply.node_id, key_pem, certificate_pem, authority_pem


def _fetch_authority(url: str, fingerprint: str, timeout_s: float) -> bytes:
    """The authority's certificate as clean PEM, proven to be the one that the token names."""
    exchange = Exchange(parse_hub_url(url), unverified_context(), timeout_s)
    try:
        fetched = exchange.read(exchange.request("GET", "/ca.pem"), 64 * 1024)
    finally:
        exchange.close()
    found, authority_pem = pem_fingerprint(fetched)
    if found != fingerprint:
        raise TokenError(
            f"the hub at {exchange.address.url} is not the one this token was made for",
            cause=f"its authority is {found[:16]}..., the token says {fingerprint[:16]}...; the secret was not sent",
            next="check the address, or ask the operator of that hub for a token",
        )
    return authority_pem


# ---- retrying ------------------------------------------------------------------------------------------------------


def retrying(call: Callable[[], T], *, stop: threading.Event, what: str) -> T:
    """Repeat `call` while the hub is unreachable, until it succeeds or `stop` is set (then the last error is raised).

    Waits 0.2 s to 5 s with jitter in between. Says once that the hub is gone and once that it is back.
    """
    failures, began = 0, time.monotonic()
    while True:
        try:
            result = call()
        except UnreachableError as error:
            if stop.is_set():
                raise
            if failures == 0:
                _log.warning("%s: %s (%s); trying again", what, error.message, error.cause)
            failures += 1
            if stop.wait(backoff_s(failures)):
                raise
        else:
            if failures:
                _log.warning("%s: the hub is back after %.1f s", what, time.monotonic() - began)
            return result


def backoff_s(failures: int) -> float:
    """How long to wait after that many failures in a row: about 0.2 s, doubling to 5 s, with jitter."""
    return random.uniform(0.75, 1.0) * min(5.0, 0.2 * 2.0 ** min(failures - 1, 10))

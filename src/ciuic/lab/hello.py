"""Read the purpose of a connection from the first bytes a TLS client sends.

A TLS client opens with a ClientHello, and the names of the protocols it offers (ALPN, RFC 7301) are plain text in it.
Ciuic's clients offer `ciuic-<purpose>` first, so a relay that cannot decrypt anything still knows whether a
connection carries pushes, snapshots or control messages. Nothing here raises for bytes from outside.
"""

PURPOSES = ("control", "updates", "snapshots", "operator", "other")
MAX_HELLO_BYTES = 16 * 1024
"""More than this without a complete ClientHello counts as no ClientHello."""

_HANDSHAKE_RECORD = 22
_CLIENT_HELLO = 1
_ALPN_EXTENSION = 16
_RECORD_HEADER_BYTES = 5
_MAX_RECORD_BYTES = 16 * 1024


class _MalformedError(Exception):
    """The bytes are not a ClientHello; stays inside this module."""


class _MoreNeededError(Exception):
    """The bytes may become a ClientHello; stays inside this module."""


class _Cursor:
    """Walks over a complete message; reading past its end is malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) != count:
            raise _MalformedError
        self._at += count
        return piece

    def take_vector(self, length_bytes: int) -> bytes:
        """A vector that is preceded by its length in `length_bytes` bytes."""
        return self.take(int.from_bytes(self.take(length_bytes), "big"))

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._data)


def alpn_of(data: bytes) -> tuple[str, ...] | None:
    """The protocols offered by the ClientHello at the start of `data`.

    None means that more bytes are needed to tell; an empty tuple that this is no ClientHello, or one without ALPN.
    """
    try:
        return _alpn_of_hello(_hello_body(data[:MAX_HELLO_BYTES]))
    except _MalformedError:
        return ()
    except _MoreNeededError:
        return None if len(data) < MAX_HELLO_BYTES else ()


def purpose_of(alpn: tuple[str, ...]) -> str:
    """One of PURPOSES: what the first `ciuic-<purpose>` says, else `other`."""
    for protocol in alpn:
        purpose = protocol.removeprefix("ciuic-")
        if purpose != protocol:
            return purpose if purpose in PURPOSES else "other"
    return "other"


class PurposeReader:
    """Finds the purpose of one connection from its first bytes, in whatever pieces they come."""

    def __init__(self) -> None:
        self._seen = bytearray()
        self.purpose: str | None = None
        """None until it is known."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the client; once the purpose is known this does nothing."""
        if self.purpose is not None:
            return
        self._seen += data[: MAX_HELLO_BYTES - len(self._seen)]
        alpn = alpn_of(bytes(self._seen))
        if alpn is not None:
            self.purpose = purpose_of(alpn)
            self._seen.clear()


def _hello_body(data: bytes) -> bytes:
    """The body of the ClientHello, joined from as many TLS records as it was split into (RFC 8446, 5.1)."""
    message = bytearray()
    at, complete = 0, True
    while complete:
        at, fragment, complete = _next_fragment(data, at)
        message += fragment
        end = 4 + int.from_bytes(message[1:4], "big")
        if message[:1] not in (b"", bytes([_CLIENT_HELLO])) or (len(message) >= 4 and end > MAX_HELLO_BYTES):
            raise _MalformedError
        if len(message) >= max(end, 4):
            return bytes(message[4:end])
    raise _MoreNeededError


def _next_fragment(data: bytes, at: int) -> tuple[int, bytes, bool]:
    """(start of the next record, what is there of this record's content, whether that is all of it)."""
    header = data[at : at + _RECORD_HEADER_BYTES]
    if (len(header) >= 1 and header[0] != _HANDSHAKE_RECORD) or (len(header) >= 2 and header[1] != 3):
        raise _MalformedError
    if len(header) < _RECORD_HEADER_BYTES:
        raise _MoreNeededError
    length = int.from_bytes(header[3:5], "big")
    if not 0 < length <= _MAX_RECORD_BYTES:
        raise _MalformedError
    start = at + _RECORD_HEADER_BYTES
    fragment = data[start : start + length]
    return start + length, fragment, len(fragment) == length


def _alpn_of_hello(body: bytes) -> tuple[str, ...]:
    """Skip to the extensions of a ClientHello (RFC 8446, 4.1.2) and read ALPN, if it is there."""
    hello = _Cursor(body)
    hello.take(2 + 32)  # legacy version, random
    hello.take_vector(1)  # session id
    hello.take_vector(2)  # cipher suites
    hello.take_vector(1)  # compression methods
    if hello.at_end:
        return ()
    extensions = _Cursor(hello.take_vector(2))
    while not extensions.at_end:
        kind = int.from_bytes(extensions.take(2), "big")
        content = extensions.take_vector(2)
        if kind == _ALPN_EXTENSION:
            return _protocol_names(content)
    return ()


def _protocol_names(content: bytes) -> tuple[str, ...]:
    names = _Cursor(_Cursor(content).take_vector(2))
    found = []
    while not names.at_end:
        found.append(names.take_vector(1).decode("ascii", "replace"))
    return tuple(found)

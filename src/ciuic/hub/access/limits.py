"""How much one caller may ask of a port: requests, connections, handshakes. Pure: the clock is passed in.

Callers with a certificate are counted by their name, so that many nodes behind one address do not hinder each other.
Callers without one are counted by their address. What is remembered is bounded whoever calls: a bucket that is full
again is as good as a new one and is forgotten.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ciuic.errors import UsageError

Refusal = Literal["", "rate", "open", "pending", "full"]
"""Why not: asks too often; has too many connections; has too many unfinished handshakes; the port itself is full."""

FORGET_EVERY = 1024
"""New names between two looks at which buckets are full again."""


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """Generous for training: a node with 256 fragments, or 200 nodes behind one address, stay far below.

    Increase a limit when `ciuic hub audit` shows refused requests of nodes that you know.
    """

    requests_per_s: float = 1000.0
    """Of one certificate's name, on average."""
    requests_burst: float = 5000.0
    """So many at once."""
    connections: int = 1024
    """Open at the same time, of one name. Each holds at most one request, so this bounds held answers too."""
    stranger_requests_per_s: float = 20.0
    """Of one address, without a certificate: joining, health, the authority's certificate, and refused requests."""
    stranger_requests_burst: float = 400.0
    stranger_connections: int = 128
    """Open at the same time from one address, without a certificate."""
    stranger_handshakes_per_s: float = 50.0
    """TLS handshakes of one address that fail, or end without a certificate. When they are used up, nobody of this
    address gets a new connection for a moment; those that are open stay."""
    stranger_handshakes_burst: float = 2000.0
    pending_handshakes: int = 256
    """Connections of one address that have not finished their TLS handshake."""
    total_strangers: int = 1024
    """Connections without a certificate, and unfinished handshakes, of all addresses together."""
    total_connections: int = 16_384
    """Of everybody; also bounded by how many files this process may open."""

    def changed(self, given: list[str]) -> "LimitSettings":
        """With `NAME=NUMBER` texts. Raises UsageError."""
        known = {field.name: field.type for field in dataclasses.fields(self)}
        values: dict[str, float] = {}
        for text in given:
            name, _, number = text.partition("=")
            name = name.strip().replace("-", "_")
            try:
                value = float(number)
            except ValueError:
                value = -1.0
            if name not in known or not 1 <= value < float("inf"):
                raise UsageError(
                    f"{text!r} is not a limit",
                    cause=f"there are {', '.join(name.replace('_', '-') for name in known)}; each at least 1",
                    next="write for example --limit connections=2000",
                )
            values[name] = int(value) if isinstance(getattr(self, name), int) else value
        return dataclasses.replace(self, **values)


class Bucket:
    """A token bucket: `rate_per_s` on average, `burst` at once."""

    __slots__ = ("_at_s", "_left", "burst", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self.rate_per_s, self.burst = rate_per_s, burst
        self._left, self._at_s = burst, now_s

    def _fill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self._at_s) * self.rate_per_s
        self._left, self._at_s = min(self.burst, self._left + gained), now_s

    def take(self, now_s: float, cost: float = 1.0) -> bool:
        """Whether there is enough left; nothing is taken when there is not."""
        self._fill(now_s)
        if self._left < cost:
            return False
        self._left -= cost
        return True

    def wait_s(self, now_s: float, cost: float = 1.0) -> float:
        """How long until `take` works."""
        self._fill(now_s)
        return max(0.0, cost - self._left) / self.rate_per_s

    def is_full(self, now_s: float) -> bool:
        """Nothing is remembered of it."""
        self._fill(now_s)
        return self._left >= self.burst


class Buckets:
    """One bucket per key, as long as it has something to remember."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s, self._burst = rate_per_s, burst
        self._buckets: dict[str, Bucket] = {}
        self._look_at = FORGET_EVERY

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now_s: float, cost: float = 1.0) -> bool:
        """See Bucket.take."""
        return self._of(key, now_s).take(now_s, cost)

    def wait_s(self, key: str, now_s: float) -> float:
        """See Bucket.wait_s."""
        return self._of(key, now_s).wait_s(now_s)

    def _of(self, key: str, now_s: float) -> Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._look_at:
                self._buckets = {k: b for k, b in self._buckets.items() if not b.is_full(now_s)}
                self._look_at = len(self._buckets) + FORGET_EVERY
            bucket = self._buckets[key] = Bucket(self._rate_per_s, self._burst, now_s)
        return bucket


class Limits:
    """The counts of one port. Confined to its event loop."""

    def __init__(self, settings: LimitSettings | None = None) -> None:
        self.settings = settings or LimitSettings()
        given = self.settings
        self._known = Buckets(given.requests_per_s, given.requests_burst)
        self._strangers = Buckets(given.stranger_requests_per_s, given.stranger_requests_burst)
        self._handshakes = Buckets(given.stranger_handshakes_per_s, given.stranger_handshakes_burst)
        self._open: Counter[str] = Counter()
        """Connections by name, of callers with a certificate."""
        self._open_strangers: Counter[str] = Counter()
        self._pending: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """By reason, since the start."""

    # ---- connections

    @property
    def total(self) -> int:
        """Connections of everybody, with unfinished handshakes."""
        return self._open.total() + self.total_strangers

    @property
    def total_strangers(self) -> int:
        """Connections without a certificate, and unfinished handshakes."""
        return self._open_strangers.total() + self._pending.total()

    def arrive(self, address: str, now_s: float) -> Refusal:
        """A TCP connection: may it begin its handshake? When it may, `settle` or `give_up` must follow."""
        given = self.settings
        why: Refusal = ""
        if self.total >= given.total_connections or self.total_strangers >= given.total_strangers:
            why = "full"
        elif self._pending[address] >= given.pending_handshakes:
            why = "pending"
        elif self._handshakes.wait_s(address, now_s) > 0:
            why = "rate"
        if why:
            return self._refuse(why)
        self._pending[address] += 1
        return ""

    def give_up(self, address: str, now_s: float) -> None:
        """The handshake failed, or took too long."""
        _less(self._pending, address)
        self._handshakes.take(address, now_s)

    def settle(self, address: str, name: str, now_s: float) -> Refusal:
        """The handshake is done; `name` is empty without a certificate. When it may stay, `leave` must follow."""
        _less(self._pending, address)
        given = self.settings
        if name:
            if self._open[name] >= given.connections:
                return self._refuse("open")
            self._open[name] += 1
        else:
            self._handshakes.take(address, now_s)
            if self._open_strangers[address] >= given.stranger_connections:
                return self._refuse("open")
            self._open_strangers[address] += 1
        return ""

    def leave(self, address: str, name: str) -> None:
        """A connection that had settled has ended."""
        _less(*((self._open, name) if name else (self._open_strangers, address)))

    # ---- requests

    def ask(self, address: str, name: str, now_s: float) -> float:
        """A request: 0 when it may go on, else how many seconds to wait before the next."""
        buckets, key = (self._known, name) if name else (self._strangers, address)
        if buckets.take(key, now_s):
            return 0.0
        self._refuse("rate")
        return max(0.001, buckets.wait_s(key, now_s))

    def _refuse(self, why: Refusal) -> Refusal:
        self.refused[why] += 1
        return why


def _less(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]

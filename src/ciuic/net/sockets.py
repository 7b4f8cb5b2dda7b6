"""What the kernel does for our sockets: congestion control, and what it has measured about a connection (Linux)."""

import logging
import socket
import struct
import sys
from dataclasses import dataclass

BBR = "bbr"
UNSENT_BYTES = 256 * 1024
"""A sender hands the kernel no more than so much that it cannot send yet: the next chunk goes to whoever is ready."""
_TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", None)
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47) if sys.platform == "linux" else None
_UNPACED = (1 << 32) - 1
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_INFO_BYTES = 256
_MIN_RTT, _SENT, _AGAIN = 148, 200, 208
"""Places of tcpi_min_rtt (microseconds), tcpi_bytes_sent and tcpi_bytes_retrans in struct tcp_info."""
_NAME_BYTES = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CongestionFacts:
    """How this machine's kernel paces what we send."""

    name: str
    """Of the algorithm a socket of ours gets; empty where the kernel does not say."""
    why_not_bbr: str = ""
    """Empty when it is BBR."""

    @property
    def is_bbr(self) -> bool:
        return self.name == BBR

    def describe(self) -> str:
        """For people: `bbr`, or what is used instead and why."""
        if self.is_bbr:
            return BBR
        return f"{self.name or 'unknown'}, more connections instead of bbr ({self.why_not_bbr})"

    @property
    def remedy(self) -> str:
        """What an operator can do; empty with BBR."""
        return "" if self.is_bbr else "as root: modprobe tcp_bbr, sysctl net.ipv4.tcp_allowed_congestion_control"


@dataclass(frozen=True, kw_only=True)
class TcpFacts:
    """One connection so far, as its kernel counts it."""

    round_trip_s: float
    """The shortest seen."""
    sent_bytes: int
    repeated_bytes: int
    """Of these, sent again."""


def congestion_facts() -> CongestionFacts:
    """What a new socket of this process gets. Opens no connection."""
    if _TCP_CONGESTION is None:
        return CongestionFacts(name="", why_not_bbr="this system cannot choose per socket")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        reason = prefer_bbr(trial)
        return CongestionFacts(name=congestion_of(trial), why_not_bbr=reason)


def prefer_bbr(sock: socket.socket) -> str:
    """Ask the kernel for BBR on this socket's sending side; why not, empty when it has it.

    At 0.1 % loss and 150 ms CUBIC reaches 4 % of a 100 Mbit/s link, BBR 52 %. Accepted sockets inherit the listener's.
    """
    if _TCP_CONGESTION is None:
        return "this system cannot choose per socket"
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, BBR.encode())
    except OSError as error:  # not compiled in, or not allowed here: the kernel's default does
        _log.debug("bbr is not available on this machine: %s", error)
        return (error.strerror or str(error)).lower()
    return ""


def congestion_of(sock: socket.socket) -> str:
    """Name of the algorithm; empty where the kernel does not say."""
    if _TCP_CONGESTION is None:
        return ""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, _NAME_BYTES).split(b"\0")[0].decode("ascii")
    except OSError:
        return ""


def keep_unsent_small(sock: socket.socket) -> None:
    """Block a sender while more than UNSENT_BYTES wait in the kernel that could not be sent yet."""
    if _TCP_NOTSENT_LOWAT is None:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    except OSError as error:
        _log.debug("unsent bytes cannot be bounded: %s", error)


def pace(sock: socket.socket, bits_per_s: float) -> None:
    """Let the kernel send no faster than that on this connection; 0: as fast as it finds right."""
    if _SO_MAX_PACING_RATE is None:
        return
    rate = min(_UNPACED - 1, round(bits_per_s / 8)) if bits_per_s > 0 else _UNPACED
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", rate))
    except OSError as error:
        _log.debug("the rate of a connection cannot be bounded: %s", error)


def tcp_facts(sock: socket.socket) -> TcpFacts | None:
    """None where the kernel does not say, or the connection is closed."""
    if _TCP_INFO is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) < _AGAIN + 8:
        return None
    return TcpFacts(
        round_trip_s=struct.unpack_from("<I", info, _MIN_RTT)[0] / 1e6,
        sent_bytes=struct.unpack_from("<Q", info, _SENT)[0],
        repeated_bytes=struct.unpack_from("<Q", info, _AGAIN)[0],
    )

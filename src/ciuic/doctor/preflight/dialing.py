"""Every node dials every other one at the address that gloo would announce, and compares clocks on the way.

A listener answers whoever knows its token: first with the token, then each line with its own time. The clock offset is
the one of the fastest round trip (as NTP does it): the other's time minus the middle of ours, known to half of the
round trip.
"""

import secrets
import socket
import socketserver
import threading
import time
from io import BufferedRWPair

import msgspec

PINGS = 8
TRY_S = 5.0
_LINE = 128


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What one node found when it dialled another."""

    to: int
    address: str = ""
    rtt_s: float = 0.0
    offset_s: float = 0.0
    """The other's clock minus ours."""
    problem: str = ""


class Listener:
    """Answers dialling nodes on a thread of its own, until `close()`."""

    def __init__(self, address: str) -> None:
        """Listens on a free port of `address`. Raises OSError when it is not one of this machine."""
        self.token = secrets.token_hex(16)
        self._server = _Server((address, 0), self.token)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="preflight-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.token = token
        super().__init__(address, _Answers)


class _Answers(socketserver.StreamRequestHandler):
    timeout = TRY_S

    def handle(self) -> None:
        token = self.server.token if isinstance(self.server, _Server) else ""
        try:
            said = self.rfile.readline(_LINE).strip()
            if not secrets.compare_digest(said, token.encode()):
                return
            self.wfile.write(token.encode() + b"\n")
            while self.rfile.readline(_LINE):
                self.wfile.write(b"%d\n" % time.time_ns())
        except OSError:
            return  # the other side is gone, or says nothing: it sees for itself


def dial(to: int, address: str, port: int, token: str) -> Link:
    """Connect, make sure who it is, measure. Never raises for what the other side does."""
    where = f"{address}:{port}"
    try:
        with socket.create_connection((address, port), timeout=TRY_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection.makefile("rwb") as stream:
                stream.write(token.encode() + b"\n")
                stream.flush()
                if stream.readline(_LINE).strip() != token.encode():
                    return Link(to=to, address=where, problem="another program answers there")
                rtt_s, offset_s = min(_ping(stream) for _ in range(PINGS))
    except TimeoutError:
        return Link(to=to, address=where, problem=f"no answer within {TRY_S:.0f} s")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Link(to=to, address=where, problem=reason.lower())
    return Link(to=to, address=where, rtt_s=rtt_s, offset_s=offset_s)


def _ping(stream: BufferedRWPair) -> tuple[float, float]:
    """(round trip, offset) in seconds."""
    began, began_ns = time.perf_counter(), time.time_ns()
    stream.write(b"\n")
    stream.flush()
    said = stream.readline(_LINE)
    if not said:
        raise ConnectionResetError("the connection was closed")
    other_ns = int(said)
    rtt_s = time.perf_counter() - began
    return rtt_s, (other_ns - began_ns) / 1e9 - rtt_s / 2

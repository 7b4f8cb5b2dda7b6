"""One TLS connection to the hub, and what its failures mean for a person.

Everything that can go wrong below HTTP is turned into UnreachableError (try again later) or CertificateError (trying
again does not help) in one place, `explain`.
"""

import http.client
import logging
import socket
import ssl
import time

from ciuic.errors import CertificateError, CiuicError, UnreachableError
from ciuic.net.pinned import check_serving
from ciuic.net.proxy import Proxy, proxy_for
from ciuic.net.sockets import keep_unsent_small, prefer_bbr
from ciuic.net.url import HubAddress
from ciuic.units import format_duration

_log = logging.getLogger(__name__)

NETWORK_ERRORS = (OSError, http.client.HTTPException)
"""What http.client and ssl raise for a connection that cannot be used."""

DEAD_KEEP_ALIVE = (
    http.client.RemoteDisconnected,
    BrokenPipeError,
    ConnectionResetError,
    ConnectionAbortedError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)
"""How a connection looks that the other side closed while it was idle."""

INTERRUPTED = "interrupted by another thread of this process"
"""The cause in the UnreachableError of a request that `interrupt` has ended."""


class ProxyRefusedError(OSError):
    """The HTTP proxy did not make a tunnel to the hub."""


class HubConnection(http.client.HTTPSConnection):
    """An HTTPS connection with small messages sent at once and, where the kernel has it, BBR.

    It goes through the HTTP proxy that the environment names, if any.
    """

    def __init__(self, address: HubAddress, context: ssl.SSLContext, timeout_s: float) -> None:
        """Does not connect yet. Raises UsageError for a proxy that cannot be used."""
        self.proxy: Proxy | None = proxy_for(address)
        first = self.proxy or address
        super().__init__(first.host, first.port, timeout=timeout_s, context=context)
        self.interrupted = False
        """It looks like a dead keep-alive connection then, but must not be replaced by a new one."""
        if self.proxy is not None:
            headers = {"Proxy-Authorization": self.proxy.authorization} if self.proxy.authorization else {}
            self.set_tunnel(address.host, address.port, headers)

    def connect(self) -> None:
        """Open the connection; time-outs are per step without progress."""
        began_s = time.perf_counter()
        super().connect()
        _log.debug("a connection was opened in %.3f s", time.perf_counter() - began_s)
        try:
            check_serving(self.sock)
        except CertificateError:
            self.close()
            raise
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        keep_unsent_small(self.sock)
        prefer_bbr(self.sock)

    def _tunnel(self) -> None:
        """What http.client calls to ask the proxy; its plain OSError says nothing of a proxy."""
        try:
            super()._tunnel()  # type: ignore[misc]  # ty: ignore[missing-attribute]
        except (TimeoutError, ssl.SSLError):
            raise
        except (OSError, http.client.HTTPException) as error:
            raise ProxyRefusedError(str(error)) from error

    def interrupt(self) -> None:
        """From another thread: make whatever waits on this connection fail at once.

        Not SSLSocket.shutdown: that one first drops the TLS layer, and a concurrent send would go out in plain text.
        """
        self.interrupted = True
        connected = self.sock
        if connected is None:
            return
        try:
            socket.socket.shutdown(connected, socket.SHUT_RDWR)
        except OSError as error:  # already closed by the other side
            _log.debug("the connection was already down: %s", error)


def explain(error: Exception, address: HubAddress, timeout_s: float) -> CiuicError:
    """The error a caller sees for something in NETWORK_ERRORS."""
    where = address.url
    if (proxied := _explain_proxy(error, address)) is not None:
        return proxied
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_verification(error, where)
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return _explain_alert(error, where)
    if isinstance(error, socket.gaierror):
        return UnreachableError(
            f"the hub's name {address.host} cannot be resolved",
            cause=str(error),
            next="check the spelling of the address and this machine's DNS",
        )
    if isinstance(error, TimeoutError):
        return UnreachableError(
            f"the hub at {where} does not answer",
            cause=f"nothing moved for {format_duration(timeout_s)}",
            next=f"check the network, and that a firewall lets this machine dial out to port {address.port}",
        )
    if isinstance(error, ConnectionRefusedError):
        return UnreachableError(
            f"the hub at {where} does not answer",
            cause=f"connection refused: nothing listens on port {address.port} there",
            next="start it with `ciuic hub start`, or check the port",
        )
    if isinstance(error, ssl.SSLError) and (error.reason or "") in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return UnreachableError(
            f"what listens at {where} does not speak TLS", cause=str(error), next="check the port of the hub"
        )
    return UnreachableError(
        f"the connection to the hub at {where} broke",
        cause=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
        next="check the network; `ciuic node check` tests each step to the hub",
    )


def _explain_proxy(error: Exception, address: HubAddress) -> UnreachableError | None:
    """When the way to the hub ended at a proxy."""
    proxy = proxy_for(address)
    if proxy is None:
        return None
    if isinstance(error, ProxyRefusedError):
        return UnreachableError(
            f"the proxy at {proxy.url} makes no connection to {address.url}",
            cause=str(error).lower(),
            next="ask its owner to allow it, put user and password into HTTPS_PROXY, or list the hub in NO_PROXY",
        )
    if isinstance(error, socket.gaierror | ConnectionRefusedError):
        return UnreachableError(
            f"the proxy at {proxy.url} cannot be reached",
            cause=str(error),
            next="check HTTPS_PROXY, or list the hub in NO_PROXY when it can be reached directly",
        )
    return None


def is_handshake_error(error: CiuicError) -> bool:
    """Whether a CertificateError comes from TLS itself rather than from the hub's authenticated answer.

    Something between us and the hub (a captive portal, a proxy) can cause the first kind for a while.
    """
    return isinstance(error, CertificateError) and isinstance(error.__cause__, ssl.SSLError)


def _explain_verification(error: ssl.SSLCertVerificationError, where: str) -> CertificateError:
    message = error.verify_message
    if error.verify_code in (62, 64):  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
        return CertificateError(
            f"the hub's certificate does not cover {where}",
            cause=message,
            next="start the hub with this name (`ciuic hub start --name NAME`), or use one that it lists",
        )
    if error.verify_code in (9, 10):  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
        return CertificateError(
            f"the certificate of the hub at {where} is not valid now",
            cause=message,
            next="check this machine's clock; if it is right, restart the hub, which renews its certificate",
        )
    return CertificateError(
        f"the server at {where} has no certificate of this network's authority",
        cause=message,
        next="check the address; if the hub was set up anew, join again with a new token",
    )


def _explain_alert(error: ssl.SSLError, where: str) -> CiuicError:
    reason = (error.reason or "").lower()
    if not any(word in reason for word in ("certificate", "unknown_ca", "access_denied", "decrypt_error")):
        return UnreachableError(f"the TLS handshake with {where} failed", cause=str(error), next="check the address")
    return CertificateError(
        f"the hub at {where} refuses our certificate",
        cause=reason.replace("_", " "),
        next="join again with a token from `ciuic hub token create`",
    )

"""The HTTP proxy that the environment names for the way to a hub: HTTPS_PROXY, NO_PROXY.

A CONNECT tunnel: TLS goes through it from end to end, so the proxy sees addresses and amounts, nothing else. User name
and password come from the environment only and appear in no message or log.
"""

import base64
import ipaddress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import (
    getproxies_environment,
    proxy_bypass_environment,  # ty: ignore[import-not-found]
)

from ciuic.errors import UsageError
from ciuic.net.url import HubAddress

_DEFAULT_PORT = 8080
_NEXT = "write it as http://[user:password@]host:port, or unset HTTPS_PROXY (NO_PROXY lists hosts to reach directly)"


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """Where to ask for a tunnel."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)
    """Value of Proxy-Authorization; empty: none."""

    @property
    def url(self) -> str:
        """Without the password."""
        return f"http://{self.host}:{self.port}"


def proxy_for(address: HubAddress) -> Proxy | None:
    """The proxy for this hub, None for a direct way. This machine's own addresses are always reached directly.

    Raises UsageError when HTTPS_PROXY cannot be understood.
    """
    proxies = getproxies_environment()
    text = proxies.get("https", "")
    if not text or _is_loopback(address.host):
        return None
    if proxy_bypass_environment(f"{address.host}:{address.port}", proxies):
        return None
    return parse_proxy(text)


def parse_proxy(text: str) -> Proxy:
    """Read a proxy's address. Raises UsageError; the message does not hold the address, it may have a password."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError("HTTPS_PROXY is not an address", cause="its port is not a number", next=_NEXT) from error
    if not host or parts.scheme != "http":
        cause = "it names no host" if not host else f"a proxy is spoken to by http here, not {parts.scheme}"
        raise UsageError("HTTPS_PROXY cannot be used", cause=cause, next=_NEXT)
    return Proxy(host=host, port=port or _DEFAULT_PORT, authorization=_basic(parts.username, parts.password))


def _basic(user: str | None, password: str | None) -> str:
    if not user:
        return ""
    pair = f"{unquote(user)}:{unquote(password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode("ascii")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

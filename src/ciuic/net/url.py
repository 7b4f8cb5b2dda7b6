"""The address of a hub: `https://host[:port]`."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from ciuic.errors import UsageError

_NEXT = "write for example https://hub.example.org:8443"


@dataclass(frozen=True, kw_only=True)
class HubAddress:
    """Where a hub listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The address as it is written, with the port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"


def parse_hub_url(url: str) -> HubAddress:
    """Read a hub address. Raises UsageError when it is not `https://host[:port]`, or carries a password."""
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is not a hub address", cause=str(error), next=_NEXT) from error
    if parts.username or parts.password:
        raise UsageError("a hub address carries no user name or password", next=_NEXT)
    if parts.scheme != "https":
        raise UsageError(f"{url!r} is not a hub address", cause="it does not begin with https://", next=_NEXT)
    if not host or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is not a hub address", cause="only host and port belong in it", next=_NEXT)
    return HubAddress(host=host, port=port or 443)

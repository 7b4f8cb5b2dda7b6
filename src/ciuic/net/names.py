"""The names under which a node may be dialled directly: plain host names and addresses, nothing that means many."""

import ipaddress
import re
from collections.abc import Sequence

from ciuic.errors import CertificateError

MAX_DIRECT_NAMES = 4
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")


def check_direct_names(names: Sequence[str]) -> None:
    """Raises CertificateError naming the one that cannot be in a node's certificate."""
    if len(names) > MAX_DIRECT_NAMES:
        raise CertificateError(f"a node has at most {MAX_DIRECT_NAMES} names for direct connections, not {len(names)}")
    for name in names:
        if not is_direct_name(name):
            raise CertificateError(
                f"a node cannot be dialled as {name[:80]!r}",
                cause="it is no host name and no address of one machine",
                next="give a name like gpu1.example.org or an address like 192.0.2.7",
            )


def is_direct_name(name: str) -> bool:
    """Whether it names one machine: no wildcard, no address for all or for many."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        is_number = name.replace(".", "").isdigit()
        return not is_number and _HOST.fullmatch(name) is not None
    return not (address.is_unspecified or address.is_multicast)


def plain_name(name: str) -> str:
    """As a certificate writes it."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name

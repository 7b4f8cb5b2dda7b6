"""By which address others reach this machine, when its host name tells them nothing.

Rented machines often have a host name that nothing resolves, or that stands for 127.0.1.1 in /etc/hosts. Programs that
advertise the name (torch's gloo and torchrun do) then wait for each other for ever.
"""

import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit

import psutil

HTTPS_PORT = 443


def address_towards(url: str) -> str:
    """This machine's own address on the way to the host of `url`; empty when there is no way. Nothing is sent."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(parts.hostname, parts.port or HTTPS_PORT, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, where in found:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as end:
                end.connect(where)  # a datagram socket only looks up the route
                return str(end.getsockname()[0])
    return ""


def host_name_is_reachable(url: str) -> bool:
    """Whether this machine's host name stands for an address of its own that also counts beyond the machine.

    A loopback address counts when the host of `url` is reached over loopback too.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return False
    own = {address.address.partition("%")[0] for each in psutil.net_if_addrs().values() for address in each}
    mine = {address for address in found if address.partition("%")[0] in own}
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in mine):
        towards = address_towards(url)
        return bool(mine) and bool(towards) and ipaddress.ip_address(towards.partition("%")[0]).is_loopback
    return True


def interface_of(address: str) -> str:
    """The name of the interface that has this address; empty when none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return ""


def own_addresses() -> list[str]:
    """The addresses of this machine that count beyond it, IPv4 first."""
    found: list[str] = []
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            with contextlib.suppress(ValueError):  # a hardware address
                address = ipaddress.ip_address(each.address)
                if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                    found.append(str(address))
    return sorted(dict.fromkeys(found), key=lambda text: (":" in text, text))


def advertised_host() -> str:
    """What to call this machine towards others: its host name, or an address when nothing resolves the name."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return next(iter(own_addresses()), name)
    return name

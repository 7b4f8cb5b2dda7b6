"""Which network interface gloo and NCCL would take, from the environment and what this machine has.

gloo (torch 2.13): GLOO_SOCKET_IFNAME is a list of whole names; without it the address that the host's own name resolves
to, and loopback when it resolves to nothing that can be bound. NCCL: NCCL_SOCKET_IFNAME is a list of prefixes, `=` for
whole names, `^` for those to leave out; without it interfaces named ib*, then all but docker* and lo, then those.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from ciuic.doctor.preflight.records import Check, fail, ok, unknown, warn

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")
"""Interfaces that containers of one machine share: other machines do not reach them."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One network interface with its addresses, IPv4 first."""

    name: str
    addresses: tuple[str, ...]
    up: bool = True

    @property
    def usable(self) -> bool:
        return self.up and bool(self.addresses)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a library would take."""

    interface: str = ""
    address: str = ""
    why: str = ""
    problem: str = ""
    """Why it would fail; empty when it would not."""
    next: str = ""


def list_interfaces() -> list[Interface]:
    """The interfaces of this machine; link-local addresses are left out."""
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        for_family = [
            [entry.address for entry in entries if entry.family == family]
            for family in (socket.AF_INET, socket.AF_INET6)
        ]
        addresses = [address for one in for_family for address in one if not address.startswith("fe80")]
        up = name in states and states[name].isup
        found.append(Interface(name=name, addresses=tuple(addresses), up=up))
    return found


def own_addresses(host: str = "") -> list[str]:
    """What a name (by default this machine's own) resolves to, in order; empty when it does not."""
    try:
        found = socket.getaddrinfo(host or socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def gloo_choice(environment: Mapping[str, str], interfaces: Sequence[Interface], resolved: Sequence[str]) -> Choice:
    """What gloo takes; `resolved`: the addresses of this machine's own name."""
    wish = environment.get(GLOO, "")
    if not wish:
        return _default_choice(interfaces, resolved)
    by_name = {one.name: one for one in interfaces}
    usable = ", ".join(one.name for one in interfaces if one.usable)
    if wish[0] in "^=":
        return Choice(
            problem=f"{GLOO}={wish}: gloo knows neither ^ nor =, those are NCCL's; it would look for {wish!r}",
            next=f"name the interface itself, one of: {usable}",
        )
    for name in wish.split(","):
        if name not in by_name:
            longer = [one.name for one in interfaces if name.strip() and one.name.startswith(name.strip())]
            hint = f"gloo takes whole names: {GLOO}={longer[0]}" if longer else f"one of: {usable}"
            return Choice(problem=f"{GLOO}={wish}: this machine has no interface {name!r}", next=hint)
        if not by_name[name].usable:
            return Choice(problem=f"{GLOO}={wish}: {name} is down or has no address", next=f"one of: {usable}")
    first = by_name[wish.split(",")[0]]
    return Choice(interface=first.name, address=first.addresses[0], why=f"{GLOO}={wish}")


def _default_choice(interfaces: Sequence[Interface], resolved: Sequence[str]) -> Choice:
    owner = {address: one.name for one in interfaces for address in one.addresses if one.up}
    for address in resolved:
        if address in owner or address.startswith("127."):
            return Choice(
                interface=owner.get(address, "lo"), address=address, why="this is what the host's own name resolves to"
            )
    why = f"the host's own name resolves to {', '.join(resolved) or 'nothing'}, so gloo falls back to loopback"
    return Choice(interface="lo", address="127.0.0.1", why=why)


def nccl_choice(environment: Mapping[str, str], interfaces: Sequence[Interface]) -> Choice:
    """What NCCL takes for its first contact (and for data where there is no InfiniBand)."""
    usable = [one for one in interfaces if one.usable]
    wish = environment.get(NCCL, "")
    if wish:
        found = [one for one in usable if _fits(wish, one.name)]
        why = f"{NCCL}={wish}"
    else:
        ranked = (
            [one for one in usable if one.name.startswith("ib")],
            [one for one in usable if not one.name.startswith(("docker", "lo"))],
            usable,
        )
        found, why = next((some for some in ranked if some), []), "the first that is neither docker* nor lo"
    if not found:
        names = ", ".join(one.name for one in usable)
        return Choice(problem=f"{why}: no interface that is up fits", next=f"name one of: {names}")
    return Choice(interface=found[0].name, address=found[0].addresses[0], why=why)


def _fits(wish: str, name: str) -> bool:
    """NCCL's own rule."""
    excludes, rest = wish.startswith("^"), wish.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    hit = any(name == part if exact else name.startswith(part) for part in rest.split(",") if part)
    return hit != excludes


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    return address.startswith("127.") or address in ("::1", "localhost")


def interface_problems(environment: Mapping[str, str], *, gpus: bool) -> tuple[str, str]:
    """Why gloo's and NCCL's variables would fail on this machine; empty where they would not, or are not set."""
    wishes = environment.get(GLOO, ""), environment.get(NCCL, "") if gpus else ""
    if not any(wishes):
        return "", ""
    interfaces = list_interfaces()
    gloo = gloo_choice(environment, interfaces, []).problem if wishes[0] else ""
    return gloo, nccl_choice(environment, interfaces).problem if wishes[1] else ""


def check_interfaces(
    environment: Mapping[str, str], interfaces: Sequence[Interface], resolved: Sequence[str], *, nnodes: int, gpus: int
) -> list[Check]:
    """One line for the host's name, one for gloo, one for NCCL where there are GPUs (or its variable is set)."""
    checks = [_check_name(resolved, nnodes, bool(environment.get(GLOO)))]
    checks.append(_check_choice("gloo interface", gloo_choice(environment, interfaces, resolved), GLOO, nnodes))
    if gpus or environment.get(NCCL):
        checks.append(_check_choice("nccl interface", nccl_choice(environment, interfaces), NCCL, nnodes))
    return checks


def _check_name(resolved: Sequence[str], nnodes: int, overruled: bool) -> Check:
    name = socket.gethostname()
    if not resolved:
        detail = f"{name} does not resolve"
        if nnodes == 1 or overruled:
            return unknown("host name", f"{detail}; nothing depends on it here")
        return warn("host name", detail, next=f"add {name} to /etc/hosts, or set {GLOO}")
    detail = f"{name} is {', '.join(resolved)}"
    if nnodes > 1 and is_loopback(resolved[0]) and not overruled:
        text = f"{detail}: a library that announces it announces loopback"
        return warn("host name", text, next=f"give {name} its network address in /etc/hosts, or set {GLOO} and {NCCL}")
    return ok("host name", detail)


def _check_choice(check: str, choice: Choice, variable: str, nnodes: int) -> Check:
    if choice.problem:
        return fail(check, choice.problem, next=choice.next)
    detail = f"{choice.interface} {choice.address}: {choice.why}"
    if nnodes > 1 and is_loopback(choice.address):
        return warn(
            check,
            f"{detail}; other machines cannot reach it",
            next=f"set {variable} to the interface between the nodes",
        )
    if nnodes > 1 and choice.interface.startswith(BRIDGES):
        return warn(
            check,
            f"{detail}; that is a bridge inside this machine",
            next=f"set {variable} to the interface between the nodes",
        )
    return ok(check, detail)

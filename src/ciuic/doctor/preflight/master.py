"""The master's address: does it resolve, whose is it, is its port free, and which way leads there."""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from ciuic.doctor.preflight.interfaces import Interface, is_loopback
from ciuic.doctor.preflight.records import Check, Settings, fail, ok, unknown, warn
from ciuic.units import format_duration

NAME = "master"
_RETRY_S = 0.3
_TRY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Way:
    """The way from here to an address."""

    address: str = ""
    """Ours, on that way; empty: there is none."""
    interface: str = ""
    problem: str = ""


def way_to(host: str, interfaces: Sequence[Interface]) -> Way:
    """Which of our addresses packets to `host` carry; nothing is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError as error:
        return Way(problem=error.strerror or str(error))
    names = [one.name for one in interfaces if address in one.addresses]
    return Way(address=address, interface=names[0] if names else "lo" if is_loopback(address) else "")


def check_master(settings: Settings, interfaces: Sequence[Interface], gloo_interface: str) -> list[Check]:
    """What can be said before anybody listens there. Without a master (one node): whether a port is to be had."""
    if not settings.host:
        return [check_free_port()]
    if not 0 < settings.port < 65536:
        return [fail(NAME, f"port {settings.port} is none", next="give --master HOST:PORT")]
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return [fail(NAME, f"{settings.host} does not resolve: {reason}", next="give the address as a number")]
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    checks = [_check_addresses(settings, addresses)]
    if settings.node_rank == 0:
        checks.append(_check_own(settings, addresses, interfaces))
    elif settings.nnodes > 1:
        checks.append(_check_way(settings, interfaces, gloo_interface))
    return checks


def _check_addresses(settings: Settings, addresses: Sequence[str]) -> Check:
    detail = f"{settings.host} is {', '.join(addresses)}"
    if settings.nnodes > 1 and is_loopback(addresses[0]):
        remedy = "give the address that the other machines use"
        return warn(NAME, f"{detail}: on every machine that is the machine itself", next=remedy)
    return ok(NAME, detail)


def _check_own(settings: Settings, addresses: Sequence[str], interfaces: Sequence[Interface]) -> Check:
    own = {address for one in interfaces for address in one.addresses}
    if not any(address in own or is_loopback(address) for address in addresses):
        detail = f"{settings.host} is not an address of this machine, which is node rank 0 and has to listen there"
        remedy = "swap the node ranks, or give an address of this machine; behind NAT it may still be right"
        return warn("master port", detail, next=remedy)
    return judge_port(settings.port)


def judge_port(port: int) -> Check:
    """Whether something listens already; then torchrun cannot. The listener is named where that may be seen."""
    listening = listeners(port)
    if listening is None:
        return unknown("master port", f"the listeners of this machine cannot be listed; port {port}")
    if not listening:
        return ok("master port", f"{port} is free", port=port)
    who = ", ".join(listening)
    return fail("master port", f"{port} is taken by {who}", next="end that program, or choose another port", port=port)


def listeners(port: int) -> list[str] | None:
    """Programs that listen on a TCP port, as `name (pid)`; None when the system does not tell."""
    try:
        open_ports = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return None
    found = []
    for entry in open_ports:
        if entry.status == psutil.CONN_LISTEN and entry.laddr.port == port:
            try:
                name = (
                    "another user's program"
                    if entry.pid is None
                    else f"{psutil.Process(entry.pid).name()} (pid {entry.pid})"
                )
            except psutil.Error:
                name = f"pid {entry.pid}"
            found.append(name)
    return list(dict.fromkeys(found))


def check_free_port() -> Check:
    """Whether the system gives out a port on loopback at all."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return ok("free port", f"for example {server.getsockname()[1]}")
    except OSError as error:
        return fail("free port", f"none on 127.0.0.1: {error.strerror}", next="look at `ss -s`: are all ports in use?")


def _check_way(settings: Settings, interfaces: Sequence[Interface], gloo_interface: str) -> Check:
    way = way_to(settings.host, interfaces)
    if way.problem:
        return fail("route", f"no way to {settings.host}: {way.problem}", next="look at `ip route`")
    detail = f"to {settings.host} by {way.interface or 'an unnamed interface'} from {way.address}"
    if gloo_interface and way.interface and gloo_interface != way.interface:
        text = f"{detail}, but gloo would offer its address on {gloo_interface}"
        return warn("route", text, next=f"export GLOO_SOCKET_IFNAME={way.interface}")
    return ok("route", detail)


def reach_master(host: str, port: int, limit_s: float) -> Check:
    """Connect until somebody answers or `limit_s` is over: refused, silent and unreachable are told apart."""
    began, tries, last = time.monotonic(), 0, "nothing was tried"
    until = began + limit_s
    silent = False
    while (left_s := until - time.monotonic()) > 0:
        tries += 1
        try:
            socket.create_connection((host, port), timeout=min(_TRY_S, left_s)).close()
            detail = f"{host}:{port} answers after {format_duration(time.monotonic() - began)}"
            return ok("master answers", detail, tries=tries)
        except TimeoutError:
            silent, last = True, "no answer"
        except OSError as error:
            silent, last = False, (error.strerror or str(error)).lower()
        time.sleep(min(_RETRY_S, max(0.0, until - time.monotonic())))
    detail = f"{host}:{port} within {format_duration(limit_s)}: {last} ({tries} tries)"
    if silent:
        remedy = f"open port {port} in the firewall between this machine and {host}, or correct --master"
    else:
        remedy = f"start the preflight with --node-rank 0 on {host}, or correct --master"
    return fail("master answers", detail, next=remedy, tries=tries)

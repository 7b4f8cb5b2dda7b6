"""`ciuic node check`: every step from this machine to the hub, and whether the machine can work.

Each check says what it found; one that fails says what to do. Checks that need an earlier one are left out after it.
"""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import getproxies_environment

import psutil

from ciuic.errors import CertificateError, CiuicError, UnreachableError
from ciuic.net.connection import explain
from ciuic.net.exchange import Exchange
from ciuic.net.messages import decode
from ciuic.net.probe import Health
from ciuic.net.proxy import Proxy, proxy_for
from ciuic.net.tls import certificate_ends_at, client_context, unverified_context
from ciuic.net.url import HubAddress, parse_hub_url
from ciuic.node.check_more import CheckResult, check_congestion, check_devices, check_streams
from ciuic.node.identity import NodeIdentity, load_identity
from ciuic.units import format_bytes, format_duration

ENOUGH_DISK_BYTES = 2 * 1000**3
ENOUGH_MEMORY_BYTES = 1 * 1000**3
SKEW_LIMIT_S = 12 * 3600.0
"""Certificates begin a day before they are made; everything else ignores the clock of a node."""
_RENEW_DAYS = 30
_TIMEOUT_S = 10.0
_HEALTH_LIMIT_BYTES = 65536


def run_checks(
    url: str | None, home: Path, *, check_device: Callable[[], list[CheckResult]] | None = None
) -> list[CheckResult]:
    """Check this machine and, with a URL (or a stored identity), the way to the hub. Takes up to a minute.

    `check_device` in place of torch's import in a process of its own, which takes seconds.
    """
    results = list(_check_identities(home))
    url = url or _known_url(home)
    if url is None:
        detail = "no address was given and this machine has not joined a network"
        results.append(CheckResult(name="hub", ok=False, detail=detail, next="give the hub's address"))
    else:
        results += _check_way(url, home)
    results += [check_congestion(), *_check_machine(home)]
    return [*results, *(check_device or check_devices)()]


# ---- the way to the hub --------------------------------------------------------------------------------------------


def _check_way(url: str, home: Path) -> list[CheckResult]:
    try:
        address = parse_hub_url(url)
    except CiuicError as error:
        return [_failed("address", error)]
    try:
        proxy = proxy_for(address)
    except CiuicError as error:
        return [_failed("proxy", error)]
    first = address if proxy is None else HubAddress(host=proxy.host, port=proxy.port)
    steps: list[tuple[str, Callable[[], str]]] = [
        ("dns", lambda: _resolve(first)),
        ("tcp", lambda: _connect(first)),
    ]
    results = [_proxy_line(address, proxy)]
    for name, step in steps:
        try:
            results.append(CheckResult(name=name, ok=True, detail=step()))
        except OSError as error:
            return [*results, _failed(name, explain(error, address, _TIMEOUT_S))]
    results += _check_tls(address, home)
    if all(result.ok for result in results):
        results += check_streams(_identity(home))
    return results


def _proxy_line(address: HubAddress, proxy: Proxy | None) -> CheckResult:
    """What the environment says about the way; a proxy only moves the steps that follow."""
    if proxy is not None:
        return CheckResult(name="proxy", ok=True, detail=f"HTTPS_PROXY is set: the way goes through {proxy.url}")
    is_set = bool(getproxies_environment().get("https"))
    passed_by = f"HTTPS_PROXY is set, but not used for {address.host} (NO_PROXY, or this machine itself)"
    return CheckResult(name="proxy", ok=True, detail=passed_by if is_set else "none (HTTPS_PROXY is not set)")


def _resolve(address: HubAddress) -> str:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return f"{address.host} is {', '.join(dict.fromkeys(str(entry[4][0]) for entry in found))}"


def _connect(address: HubAddress) -> str:
    began = time.perf_counter()
    with socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S):
        return f"port {address.port} answers within {format_duration(time.perf_counter() - began)}"


def _check_tls(address: HubAddress, home: Path) -> list[CheckResult]:
    authorities = _known_authorities(home)
    context = client_context(authorities, None, None, "control") if authorities else unverified_context()
    exchange = Exchange(address, context, _TIMEOUT_S)
    try:
        exchange.read(exchange.request("GET", "/health"), _HEALTH_LIMIT_BYTES)  # the handshake does not count below
        began, began_wall = time.perf_counter(), time.time()
        body = exchange.read(exchange.request("GET", "/health"), _HEALTH_LIMIT_BYTES)
        took_s = time.perf_counter() - began
        health = decode(body, Health)
    except (UnreachableError, CertificateError) as error:
        return [_failed("tls", error)]
    except CiuicError as error:
        return [_failed("hub", error)]
    finally:
        exchange.close()
    how = "it belongs to this machine's network" if authorities else "not verified: no network has been joined here yet"
    results = [
        CheckResult(name="tls", ok=True, detail=how),
        CheckResult(name="hub", ok=health.ok, detail=f"ciuic {health.version}, answers in {format_duration(took_s)}"),
    ]
    if exchange.server_time is not None:
        results.append(_check_clock(exchange.server_time + 0.5 - (began_wall + took_s / 2)))
    return results


def _check_clock(offset_s: float) -> CheckResult:
    side = "behind" if offset_s > 0 else "ahead of"
    detail = f"within {max(1.0, abs(offset_s)):.0f} s of the hub's"
    if abs(offset_s) > 2:
        detail = f"{format_duration(abs(offset_s))} {side} the hub's"
    ok = abs(offset_s) < SKEW_LIMIT_S
    return CheckResult(
        name="clock", ok=ok, detail=detail, next="" if ok else "set this machine's clock (for example NTP)"
    )


# ---- what this machine keeps ---------------------------------------------------------------------------------------


def _node_folders(home: Path) -> list[Path]:
    return sorted(folder for folder in (home / "nodes").glob("*") if (folder / "identity.json").is_file())


def _identity(home: Path) -> NodeIdentity | None:
    """The first identity that can be used."""
    for folder in _node_folders(home):
        try:
            identity = load_identity(folder)
        except CiuicError:
            continue  # its own line says what is wrong with it
        if identity is not None:
            return identity
    return None


def _known_url(home: Path) -> str | None:
    identity = _identity(home)
    return None if identity is None else identity.url


def _known_authorities(home: Path) -> bytes:
    files = [*(folder / "authority.pem" for folder in _node_folders(home)), home / "operator" / "authority.pem"]
    return b"".join(file.read_bytes() for file in files if file.is_file())


def _check_identities(home: Path) -> Iterator[CheckResult]:
    for folder in _node_folders(home):
        name = f"identity {folder.name}"
        try:
            identity = load_identity(folder)
            if identity is None:
                continue
            days = int((certificate_ends_at(identity.cert.read_bytes()) - time.time()) // 86400)
        except CiuicError as error:
            yield _failed(name, error)
            continue
        detail = f"{identity.node_id} at {identity.url}, certificate ends in {days} days"
        next_ = "" if days > _RENEW_DAYS else "join again with a new token before it ends"
        yield CheckResult(name=name, ok=days >= 0, detail=detail, next=next_)


# ---- the machine ---------------------------------------------------------------------------------------------------


def _check_machine(home: Path) -> list[CheckResult]:
    existing = next((path for path in (home, *home.parents) if path.exists()), Path("/"))
    disk, memory = shutil.disk_usage(existing).free, psutil.virtual_memory().available
    writable = os.access(existing, os.W_OK)
    where = f"{format_bytes(disk)} free in {home}" + ("" if writable else ", which cannot be written")
    room = "make room, or set CIUIC_HOME to a larger disk" if writable else "set CIUIC_HOME to a folder of yours"
    need = "end other programs; a model needs 12 bytes per parameter here, plus what training takes"
    return [
        _check("disk", writable and disk >= ENOUGH_DISK_BYTES, where, room),
        _check("memory", memory >= ENOUGH_MEMORY_BYTES, f"{format_bytes(memory)} free", need),
        _check("python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11 or newer"),
    ]


def _check(name: str, ok: bool, detail: str, next: str) -> CheckResult:
    return CheckResult(name=name, ok=ok, detail=detail, next="" if ok else next)


def _failed(name: str, error: CiuicError) -> CheckResult:
    detail = f"{error.message}: {error.cause}" if error.cause else error.message
    return CheckResult(name=name, ok=False, detail=detail, next=error.next)

"""`init_process_group(init_method="ciuic://global-sync?job=abc")`: rank, world size and store from the hub.

`register` makes torch know the scheme; `reform` forms the group again after a member's death, or to let newcomers in.
"""

import atexit
import contextlib
import logging
import os
import re
import socket
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from urllib.parse import urlsplit

import torch.distributed as dist

from ciuic.errors import ConflictError, UsageError
from ciuic.net.credentials import Credentials, find_credentials
from ciuic.net.route import address_towards, host_name_is_reachable, interface_of
from ciuic.net.store_messages import GroupAsk
from ciuic.train.hub_store import HubStore, Membership
from ciuic.train.runfile import read_run_file

SCHEMES = ("ciuic", "ciuric")
"""The second is how the founding articles spell it once."""
TIMEOUT = timedelta(minutes=30)
GRACE_S = 5.0
LARGEST_WORLD = 100_000
INTERFACE = "GLOO_SOCKET_IFNAME"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEYS = ("job", "nodes", "world_size", "rank")
_SECRET = re.compile(r"token|secret|passw|pwd|key|auth|credential|cert", re.IGNORECASE)
_EXAMPLE = "write for example ciuic://global-sync?job=abc&nodes=3"
_log = logging.getLogger("ciuic.rendezvous")


# ---- the URL -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupUrl:
    """What a rendezvous URL says."""

    group: str
    job: str = ""
    nodes: int | None = None
    world_size: int | None = None
    rank: int | None = None


def parse_group_url(url: str) -> GroupUrl:
    """Read `ciuic://GROUP?job=JOB&nodes=N&world_size=W&rank=R`. Raises UsageError; secrets are never repeated."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError("this is not a rendezvous URL", cause=str(error), next=_EXAMPLE) from error
    if "@" in parts.netloc:
        raise UsageError(
            "a rendezvous URL carries no user name or password",
            cause="URLs end up in logs and process lists",
            next="who you are comes from this machine's identity (CIUIC_NODE chooses among several)",
        )
    if port is not None or parts.path not in ("", "/") or parts.fragment or not _NAME.fullmatch(parts.netloc):
        raise UsageError(
            f"{parts.scheme}:// is followed by the name of a group and nothing else",
            cause="the hub's address comes from this machine's identity",
            next=_EXAMPLE,
        )
    query = _parse_query(parts.query)
    return GroupUrl(
        group=parts.netloc,
        job=query.get("job", ""),
        nodes=_number(query, "nodes", 1),
        world_size=_number(query, "world_size", 1),
        rank=_number(query, "rank", 0),
    )


def _parse_query(text: str) -> dict[str, str]:
    """Strict, because torch's own parser drops what follows a second '=', and decodes nothing."""
    found: dict[str, str] = {}
    for pair in filter(None, text.split("&")):
        key, equals, value = pair.partition("=")
        if key not in _KEYS:
            if _SECRET.search(key):
                raise UsageError(
                    f"a rendezvous URL carries no {key[:20]}",
                    cause="URLs end up in logs and process lists",
                    next="who you are comes from this machine's identity (CIUIC_NODE chooses among several)",
                )
            raise UsageError(f"{key[:40]!r} means nothing in a rendezvous URL", next=f"use {', '.join(_KEYS)}")
        if key in found:
            raise UsageError(f"{key} stands twice in the rendezvous URL", next="give it once")
        if not equals or not _NAME.fullmatch(value):
            raise UsageError(
                f"the value of {key} in the rendezvous URL cannot be used",
                cause="it has letters, digits, dot, dash and underscore, at most 64, and nothing is decoded",
                next=_EXAMPLE,
            )
        found[key] = value
    return found


def _number(query: Mapping[str, str], key: str, least: int) -> int | None:
    text = query.get(key)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= LARGEST_WORLD:
        raise UsageError(f"{key} in the rendezvous URL is not a whole number of at least {least}", next=_EXAMPLE)
    return int(text)


# ---- who and how many ----------------------------------------------------------------------------------------------


def size_and_rank(url: GroupUrl, environment: Mapping[str, str]) -> tuple[int, int]:
    """(world size, rank; -1 when the hub chooses it).

    In this order: world_size (an argument of init_process_group, or in the URL); nodes, times LOCAL_WORLD_SIZE;
    WORLD_SIZE and RANK of the environment, outside of runs, where they count the ranks of one node only.
    Raises UsageError when none says how many there are.
    """
    told = url.rank if url.rank is not None else -1
    if url.world_size is not None:
        size = url.world_size
    elif url.nodes is not None:
        size = url.nodes * _from_environment(environment, "LOCAL_WORLD_SIZE", 1)
    elif environment.get("WORLD_SIZE") and not environment.get("CIUIC_RUN_FILE"):
        size = _from_environment(environment, "WORLD_SIZE", 1)
        told = told if told >= 0 else _from_environment(environment, "RANK", -1)
    else:
        raise UsageError(
            "it is not known how many processes this group has",
            cause="neither world_size nor nodes is given, and WORLD_SIZE is not set or counts one node only",
            next="add &nodes=N to the URL, or give world_size to init_process_group",
        )
    if told >= size:
        raise UsageError(f"rank {told} is not in a world of {size}", next="ranks go from 0 to the world size - 1")
    return size, told


def _from_environment(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError(f"{name} is {text[:40]!r}, which is not a whole number", next=f"set or unset {name}")
    return int(text)


def credentials_here() -> tuple[Credentials, str]:
    """This process's identity, and the id of the run that it is in (empty outside of runs).

    Raises CertificateError, UsageError, StorageError, NotInRunError.
    """
    if not os.environ.get("CIUIC_RUN_FILE"):
        return find_credentials(), ""
    info = read_run_file()
    found = Credentials(url=info.hub_url, name=info.node_id, authority=info.authority, cert=info.cert, key=info.key)
    return found, info.run_id


# ---- the groups of this process ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Seat:
    """A membership, and how its process group was made."""

    membership: Membership
    timeout: timedelta
    pid: int
    backend: str = ""
    ready: HubStore | None = None
    """The store of a re-formation, for the init_process_group that follows."""


class Seats:
    """The groups that this process is in, by name; a store must outlive torch's C++ objects that point to it."""

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}
        atexit.register(self.leave_all)

    def take(self, name: str, seat: _Seat) -> None:
        """Begin a membership; an older one of the same name, from an earlier init_process_group, ends."""
        older = self._seats.pop(name, None)
        if older is not None and older.pid == os.getpid():
            older.membership.leave()
        self._seats[name] = seat

    def find(self, name: str | None) -> _Seat:
        """The seat in the group called `name`, else the only one. Raises ConflictError."""
        mine = {key: seat for key, seat in self._seats.items() if seat.pid == os.getpid()}
        if name is None and len(mine) == 1:
            return next(iter(mine.values()))
        seat = mine.get(name) if name is not None else None
        if seat is None:
            raise ConflictError(
                "this process is in no such group" if mine or name else "this process is in no group of the hub",
                cause=f"it is in {', '.join(mine) or 'none'}",
                next="begin with init_process_group(init_method='ciuic://...'); name job/group if there are several",
            )
        return seat

    def take_ready(self, name: str) -> HubStore | None:
        """The store that `reform` has got for this group, once."""
        seat = self._seats.get(name)
        if seat is None or seat.ready is None:
            return None
        store, seat.ready = seat.ready, None
        return store

    def drop(self, name: str) -> None:
        self._seats.pop(name, None)

    def leave_all(self) -> None:
        """At the end of the process: the others need not wait for it."""
        for seat in self._seats.values():
            if seat.pid == os.getpid():
                seat.membership.leave()
        self._seats.clear()


@cache
def seats() -> Seats:
    """Those of this process."""
    return Seats()


# ---- torch's side --------------------------------------------------------------------------------------------------


@cache
def register() -> None:
    """Make `ciuic://` known to torch.distributed, where this torch has it."""
    if not dist.is_available():
        return
    from torch.distributed.rendezvous import register_rendezvous_handler  # `import ... as` would give a function

    for scheme in SCHEMES:
        with contextlib.suppress(RuntimeError):  # registered already, by another import of this module
            register_rendezvous_handler(scheme, rendezvous)


def rendezvous(url: str, timeout: timedelta = TIMEOUT, **_: object) -> Generator[tuple[HubStore, int, int], None, None]:
    """torch's handler: yields (store, rank, world size) once.

    Raises UsageError, AccessError, UnreachableError, ConflictError, and DistStoreError when the others do not come.
    """
    if url.startswith("ciuric:"):
        _log.warning("ciuric:// is read as ciuic://")
    group = parse_group_url(url)
    credentials, run_id = credentials_here()
    name = f"{group.job or run_id or 'default'}/{group.group}"
    store = seats().take_ready(name) or _enter(group, name, credentials, timeout)
    yield store, store.place.rank, store.place.size
    raise RuntimeError("ciuic:// meets once per init_process_group; form the group again with ciuic.torch.reform()")


def _enter(group: GroupUrl, name: str, credentials: Credentials, timeout: timedelta) -> HubStore:
    """A new membership, and the store of its first generation."""
    size, rank = size_and_rank(group, os.environ)
    choose_interface(credentials.url)
    membership = Membership(credentials, name)
    seats().take(name, _Seat(membership=membership, timeout=timeout, pid=os.getpid()))
    wish = GroupAsk(
        member=membership.member,
        min_size=size,
        max_size=size,
        rank=rank,
        local_rank=_from_environment(os.environ, "LOCAL_RANK", 0),
    )
    try:
        return membership.enter(wish, within_s=timeout.total_seconds())
    except BaseException:
        seats().drop(name)
        membership.leave()
        raise


def choose_interface(url: str) -> None:
    """Let gloo listen on the interface that leads to the hub, where this machine's host name does not say which.

    gloo listens on the address of the host name, and on loopback when nothing resolves it: the others would knock at
    their own door. What the user has set stays.
    """
    if os.environ.get(INTERFACE) or host_name_is_reachable(url):
        return
    name = interface_of(address_towards(url))
    if name:
        os.environ[INTERFACE] = name
        _log.info("the host name %s leads nowhere: gloo uses %s, which leads to the hub", socket.gethostname(), name)


@dataclass(frozen=True, kw_only=True)
class World:
    """What a re-formation gave this process."""

    group: str
    """job/group."""
    generation: int
    """Grows with each re-formation."""
    rank: int
    size: int


def reform(
    group: str | None = None,
    *,
    min_size: int = 1,
    max_size: int = 0,
    grace_s: float = GRACE_S,
    timeout: timedelta | None = None,
) -> World:
    """Form the group again, without the dead and with those that wait: every living member calls this.

    Drops the default process group, waits at the hub for the other living members (those that do not call it are left
    out `grace_s` after the first), and makes a new default process group on an empty store, with the back end and, if
    `timeout` is not given, the time-out of the old one. Ranks are dense and keep their order; newcomers come last.
    `min_size`: wait until there are that many. `max_size`: let no more in (0: no limit). `group`: `job/group`, when
    this process is in several. Raises ConflictError, UnreachableError, and DistStoreError after `timeout`. It may be
    called again after a failure. What a failed collective has left in its tensors is not defined.
    """
    seat = seats().find(group)
    seat.timeout = timeout or seat.timeout
    if dist.is_initialized():
        name = dist.get_backend()
        seat.backend = name if name != dist.Backend.UNDEFINED else dist.get_backend_config()
        _drop_process_group()
    membership = seat.membership
    wish = GroupAsk(member=membership.member, min_size=min_size, max_size=max_size, grace_s=grace_s)
    seat.ready = membership.enter(wish, within_s=seat.timeout.total_seconds())
    place = seat.ready.place
    job, _, name = membership.name.partition("/")
    # By torch's usual way, as newcomers do it: torch puts prefixes before the keys of a store it did not get that way.
    dist.init_process_group(seat.backend or None, init_method=f"ciuic://{name}?job={job}", timeout=seat.timeout)
    return World(group=membership.name, generation=place.generation, rank=place.rank, size=place.size)


def waiting(group: str | None = None) -> int:
    """How many processes wait for a re-formation (as the hub told last): newcomers, and survivors that have called it.

    Not the same number on all members at the same time: let one decide, and broadcast.
    """
    return seats().find(group).membership.news.waiting


def _drop_process_group() -> None:
    """Without waiting for anybody: pending collectives are aborted."""
    world = dist.group.WORLD
    if world is not None:
        with contextlib.suppress(RuntimeError, AttributeError):  # not every back end can
            world.abort()
    dist.destroy_process_group()

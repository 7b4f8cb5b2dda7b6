"""A torch.distributed store that the hub serves over its TLS, and the membership that goes with it.

`HubStore` is a Python subclass of torch's Store: torch's C++ side (gloo, NCCL, PrefixStore) calls back into it under
the names of its trampoline, two of which are spelled differently from the Python API (`deleteKey`, `getNumKeys`).
"""

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed import DistNetworkError, DistStoreError, Store

from ciuic.errors import CiuicError, NotFoundError, UnreachableError
from ciuic.net.client import HubClient, backoff_s
from ciuic.net.credentials import Credentials
from ciuic.net.messages import Ok
from ciuic.net.store_messages import (
    GroupAsk,
    GroupHold,
    GroupLeave,
    GroupNews,
    GroupPlace,
    StoreCall,
    StoreOperation,
    StoreReply,
)
from ciuic.units import format_duration

T = TypeVar("T")

HOLD_S = 3.0
"""A member makes itself heard at least this often; the hub counts it as dead after ten seconds of silence."""
WAIT_S = 20.0
"""How long one request waits at the hub for a key."""
FORGOTTEN_S = 15.0
"""How long a restarted hub may take to hear of the group again from its members."""
LEAVE_S = 2.0
_log = logging.getLogger("ciuic.rendezvous")


class GroupLine:
    """Calls to one group of the hub, from any thread: each call has a connection of its own for its time."""

    def __init__(self, credentials: Credentials, name: str) -> None:
        """`name` is `job/group`."""
        self.name = name
        self._credentials = credentials
        self._idle: list[HubClient] = []
        self._lock = threading.Lock()

    def call(
        self,
        verb: str,
        message: Callable[[float], msgspec.Struct],
        reply_type: type[T],
        *,
        until_s: float,
        longest_s: float = 0.0,
    ) -> T:
        """Send `message(seconds it may be held)`, again and again while the hub is away, until `until_s`.

        Raises UnreachableError when the hub stays away, and what the hub answers.
        """
        failures = 0
        while True:
            try:
                left_s = until_s - time.monotonic()
                return self._once(verb, message(max(0.0, min(longest_s, left_s))), reply_type)
            except UnreachableError:
                failures += 1
                pause_s = backoff_s(failures)
                if time.monotonic() + pause_s >= until_s:
                    raise
                time.sleep(pause_s)

    def _once(self, verb: str, message: msgspec.Struct, reply_type: type[T]) -> T:
        with self._lock:
            client = self._idle.pop() if self._idle else None
        client = client or self._credentials.connect("control")
        try:
            return client.call("POST", f"/v1/rendezvous/{self.name}/{verb}", message, reply_type)
        except UnreachableError:
            client.close()
            raise
        finally:
            with self._lock:
                self._idle.append(client)

    def close(self) -> None:
        """Close the connections that are idle; those in use follow their calls."""
        with self._lock:
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()


class Membership:
    """One process in one group: it asks for places, and makes itself heard from a thread of its own."""

    def __init__(self, credentials: Credentials, name: str) -> None:
        self.name = name
        self.member = secrets.token_hex(16)
        self.place: GroupPlace | None = None
        """Where it is now; None before the first rendezvous."""
        self.news = GroupNews(is_current=True)
        """What the hub told last."""
        self.line = GroupLine(credentials, name)
        self._credentials = credentials
        self._requests = itertools.count(1)
        self._stop = threading.Event()
        self._holder: threading.Thread | None = None
        self._hold_client: HubClient | None = None
        self._store: HubStore | None = None

    def enter(self, wish: GroupAsk, *, within_s: float) -> "HubStore":
        """Ask until the next generation is formed with this process in it; the store of that generation.

        Raises DistStoreError after `within_s`, and what the hub answers to a wish that it cannot grant.
        """
        self._stop_holding()
        before = self.place
        wish = msgspec.structs.replace(wish, member=self.member)
        if before is not None:
            wish = msgspec.structs.replace(wish, after=before.tag, rank=before.rank, expected=before.size)
        until_s = time.monotonic() + within_s
        while True:
            place = self.line.call(
                "ask",
                lambda wait_s: msgspec.structs.replace(wish, wait_s=wait_s),
                GroupPlace,
                until_s=until_s,
                longest_s=HOLD_S,
            )
            if place.status == "formed":
                break
            if time.monotonic() >= until_s:
                self._leave()
                raise DistStoreError(_not_together(self.name, wish, place, within_s))
        self.place = place
        self._store = HubStore(self, place)
        self._start_holding(place)
        _log.info("%s: rank %d of %d in generation %d", self.name, place.rank, place.size, place.generation)
        return self._store

    def leave(self, *, closes: bool = False) -> None:
        """Go on purpose: the others need not wait for this process. A hub that is away is not waited for long."""
        self._stop_holding()
        self._leave(closes=closes)
        self.line.close()

    @property
    def hub_url(self) -> str:
        """Where the hub is, as this process knows it."""
        return self._credentials.url

    def next_request(self) -> int:
        """The number of the next store call."""
        return next(self._requests)

    def _leave(self, *, closes: bool = False) -> None:
        leave = GroupLeave(member=self.member, closes=closes)
        with contextlib.suppress(CiuicError):
            client = self._credentials.connect("control", timeout_s=LEAVE_S)
            try:
                client.call("POST", f"/v1/rendezvous/{self.name}/leave", leave, Ok)
            finally:
                client.close()

    # ---- signs of life

    def _start_holding(self, place: GroupPlace) -> None:
        self._stop = threading.Event()
        self._hold_client = self._credentials.connect("control")
        self.news = GroupNews(is_current=True, alive=place.size)
        arguments = (self._stop, self._hold_client, place)
        self._holder = threading.Thread(target=self._hold, args=arguments, name="ciuic-rendezvous", daemon=True)
        self._holder.start()

    def _stop_holding(self) -> None:
        self._stop.set()
        if self._hold_client is not None and self._holder is not None:
            while self._holder.is_alive():  # it may be about to begin a request when the first interrupt comes
                self._hold_client.interrupt()
                self._holder.join(0.05)
            self._hold_client.close()
            self._hold_client = self._holder = None

    def _hold(self, stop: threading.Event, client: HubClient, place: GroupPlace) -> None:
        failures = 0
        path = f"/v1/rendezvous/{self.name}/hold"
        while not stop.is_set():
            hold = GroupHold(
                member=self.member,
                tag=place.tag,
                rank=place.rank,
                size=place.size,
                seen=self.news.revision,
                wait_s=HOLD_S,
            )
            try:
                news = client.call("POST", path, hold, GroupNews)
            except CiuicError as error:
                failures += 1
                if failures == 1 and not stop.is_set():
                    _log.warning("%s: the hub does not hear this process: %s", self.name, error)
                stop.wait(backoff_s(failures))
                continue
            failures = 0
            self.news = news
            if not news.is_current:
                if not stop.is_set():
                    _log.warning("%s was formed again without this process; it was silent for too long", self.name)
                return


class HubStore(Store):
    """The store of one generation. Any thread may use it; a member of a later generation cannot."""

    timeout: timedelta
    """torch's own property."""

    def __init__(self, membership: Membership, place: GroupPlace) -> None:
        super().__init__()
        self._membership = membership
        self._place = place

    @property
    def place(self) -> GroupPlace:
        """Rank, size and generation that go with it."""
        return self._place

    # ---- torch's names

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", (key,), values=(_to_bytes(value),))

    def get(self, key: str) -> bytes:
        """Waits for the key. Raises DistStoreError after the store's time-out."""
        return self._call("get", (key,), within_s=self._timeout_s()).values[0]

    def add(self, key: str, value: int) -> int:
        return self._call("add", (key,), amount=value).number

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", (key,), values=(_to_bytes(value),))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", tuple(keys)).number)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there. Raises DistStoreError after `timeout`, else the store's own."""
        within_s = timeout.total_seconds() if timeout is not None else self._timeout_s()
        self._call("wait", tuple(keys), within_s=within_s)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        values = (_to_bytes(expected_value), _to_bytes(desired_value))
        return self._call("compare_set", (key,), values=values).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", (key,)).number)

    def num_keys(self) -> int:
        return self._call("count", ()).number

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._call("get", tuple(keys), within_s=self._timeout_s()).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._call("set", tuple(keys), values=tuple(_to_bytes(value) for value in values))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> "HubStore":
        """It is safe for threads as it is."""
        return self

    deleteKey = delete_key  # noqa: N815 - the name that torch's C++ side looks for
    getNumKeys = num_keys  # noqa: N815

    # ---- inside

    def _timeout_s(self) -> float:
        return self.timeout.total_seconds()

    def _call(
        self,
        operation: StoreOperation,
        keys: tuple[str, ...],
        *,
        values: tuple[bytes, ...] = (),
        amount: int = 0,
        within_s: float | None = None,
    ) -> StoreReply:
        """`within_s`: how long to wait for the keys; without, the operation needs none."""
        began_s = time.monotonic()
        until_s = began_s + (self._timeout_s() if within_s is None else within_s)
        call = StoreCall(
            member=self._membership.member,
            tag=self._place.tag,
            request=self._membership.next_request(),
            operation=operation,
            keys=keys,
            values=values,
            amount=amount,
        )
        while True:
            try:
                reply = self._membership.line.call(
                    "store",
                    lambda wait_s: msgspec.structs.replace(call, wait_s=wait_s),
                    StoreReply,
                    until_s=until_s,
                    longest_s=WAIT_S if within_s is not None else 0.0,
                )
            except NotFoundError as error:  # a restarted hub hears of the group again from its members
                if time.monotonic() >= min(until_s, began_s + FORGOTTEN_S):
                    raise DistStoreError(str(error)) from error
                time.sleep(0.2)
                continue
            except UnreachableError as error:
                raise DistNetworkError(str(error)) from error
            except CiuicError as error:
                raise DistStoreError(str(error)) from error
            if reply.status == "done":
                return reply
            if time.monotonic() >= until_s:
                names, after_ms = ", ".join(reply.missing), round(1000 * (within_s or 0.0))
                raise DistStoreError(
                    f"wait timeout after {after_ms}ms, keys: {names} (group {self._membership.name}, "
                    f"{self._membership.news.alive} of {self._place.size} members alive)"
                )


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _not_together(name: str, wish: GroupAsk, place: GroupPlace, within_s: float) -> str:
    """What to say when a rendezvous has timed out."""
    asked = f"{place.present} of {wish.min_size} processes asked" if wish.min_size > 1 else f"{place.present} asked"
    text = f"{name} did not come together within {format_duration(within_s)}; {asked}"
    if place.holdouts and not wish.after:
        text += f"; {place.holdouts} processes already train under this name and let others in by ciuic.torch.reform()"
    return text

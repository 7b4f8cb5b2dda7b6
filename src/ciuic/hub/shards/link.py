"""A shard's side of the conversation with its hub: the view in by long poll, reports out, files of fragments.

Each on a thread and connection of its own. The hub may be away: what is served goes on, by the last view.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ciuic.errors import CiuicError, StorageError
from ciuic.hub.shards.config import ShardIdentity, renew_identity
from ciuic.hub.shards.host import FETCHED, ShardHost
from ciuic.ledger.files import storage_error, sync_folder
from ciuic.net import shard_messages as s
from ciuic.net.client import HubClient, backoff_s
from ciuic.net.tls import Purpose

POLL_S = 10.0
REPORT_S = 1.0
RENEWAL_PAUSE_S = 60.0
_log = logging.getLogger("ciuic.shard")


class ShardLink:
    """Threads that keep a host and its hub in step."""

    def __init__(self, identity: ShardIdentity, url: str) -> None:
        """`url`: where nodes reach this shard."""
        self._identity, self._url = identity, url
        self._stop = threading.Event()
        self._news = threading.Event()
        self._told = threading.Condition()
        self._built, self._acknowledged = 0, 0
        self._threads: list[threading.Thread] = []
        self._clients: list[HubClient] = []
        self._next_renewal_s = 0.0
        self.on_renewed: Callable[[], None] = lambda: None
        """The files of this shard's certificate are new ones."""

    def client(self, purpose: Purpose, url: str = "") -> HubClient:
        """A connection to the hub, or to another shard."""
        identity = self._identity
        made = HubClient(url or identity.hub_url, identity.authority.read_bytes(), identity.cert, identity.key, purpose)
        self._clients.append(made)
        return made

    # ---- what the host needs of the hub

    def run_of(self, run_id: str) -> s.ShardRun:
        """Job and layout of a run."""
        client = self.client("control")
        try:
            return client.call("GET", f"/v1/runs/{run_id}/shard", None, s.ShardRun)
        finally:
            self._drop(client)

    def fetch(self, part: s.RunPart, place: s.FragmentPlace, folder: Path) -> None:
        """Copy the files of a frozen fragment from its owner into `folder`, durable."""
        client = self.client("snapshots", place.url)
        path = f"/v1/runs/{part.run_id}"
        try:
            found = client.call("GET", f"{path}/files?fragment={place.fragment}", None, s.MovedFiles)
            for file in found.files:
                if not FETCHED.fullmatch(file.name):
                    raise StorageError(f"{place.shard or 'the hub'} offers a file {file.name[:100]!r}")
                target = folder / file.name
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                if file.size_bytes:
                    query = f"fragment={place.fragment}&name={file.name}"
                    client.download(f"{path}/file?{query}", target, file.size_bytes)
                else:
                    target.touch()
                _make_durable(target)
        except OSError as error:
            raise storage_error(f"cannot write {folder}", error) from error
        finally:
            self._drop(client)

    def _drop(self, client: HubClient) -> None:
        client.close()
        with suppress(ValueError):
            self._clients.remove(client)

    # ---- threads

    def start(self, host: ShardHost) -> None:
        """Begin; the host is driven from here on."""
        for name, loop in (("view", self._view_loop), ("report", self._report_loop), ("rounds", self._round_loop)):
            thread = threading.Thread(target=self._guarded, args=(name, loop, host), name=f"shard-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wake(self) -> None:
        """There is something to report."""
        self._news.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the hub has a report of the present state."""
        with self._told:
            wanted = self._built + 1
            self._news.set()
            return self._told.wait_for(lambda: self._acknowledged >= wanted or self._stop.is_set(), timeout_s)

    def stop(self) -> None:
        """End all threads; a long poll is interrupted."""
        self._stop.set()
        self._news.set()
        for client in list(self._clients):
            client.interrupt()
        for thread in self._threads:
            thread.join(5.0)

    def _guarded(self, name: str, loop: "Callable[[ShardHost], None]", host: ShardHost) -> None:
        """A loop that crashes begins again: a shard without its threads would stall every run."""
        while not self._stop.is_set():
            try:
                loop(host)
            except Exception:  # noqa: BLE001 - see above
                _log.exception("the %s thread crashed", name)
                self._stop.wait(1.0)

    def _view_loop(self, host: ShardHost) -> None:
        client, failures = self.client("control"), 0
        while not self._stop.is_set():
            poll = s.ShardPoll(url=self._url, known=host.known, wait_s=POLL_S)
            try:
                view = client.call("POST", "/v1/shard/view", poll, s.ShardView, timeout_s=POLL_S + 15)
            except CiuicError as error:
                failures = self._failed(failures, "asking the hub", error)
                continue
            failures = self._worked(failures)
            if view.renew:
                self._renew()
            if view.number != host.known:
                host.apply(view)
                self._news.set()

    def _renew(self) -> None:
        """The hub wants this shard's certificate renewed; at most once a minute."""
        if time.monotonic() < self._next_renewal_s:
            return
        self._next_renewal_s = time.monotonic() + RENEWAL_PAUSE_S
        try:
            renew_identity(self._identity)
            self.on_renewed()
        except (CiuicError, OSError) as error:
            _log.warning("the certificate cannot be renewed now: %s; trying again, the old one holds", error)

    def _report_loop(self, host: ShardHost) -> None:
        client, failures = self.client("control"), 0
        while not self._stop.is_set():
            self._news.wait(REPORT_S)
            self._news.clear()
            with self._told:
                self._built += 1
                number = self._built
            report = host.report()
            try:
                reply = client.call("POST", "/v1/shard/report", report, s.ShardReply)
            except CiuicError as error:
                host.not_told(report)
                failures = self._failed(failures, "reporting to the hub", error)
                continue
            failures = self._worked(failures)
            if host.told(reply):
                self._news.set()
            with self._told:
                self._acknowledged = number
                self._told.notify_all()

    def _round_loop(self, host: ShardHost) -> None:
        while not self._stop.wait(min(0.25, host.close_due())):
            pass

    def _failed(self, failures: int, what: str, error: CiuicError) -> int:
        if not self._stop.is_set() and failures == 0:
            _log.warning("%s: %s; trying again", what, error)
        self._stop.wait(min(1.0, backoff_s(failures + 1)))
        return failures + 1

    def _worked(self, failures: int) -> int:
        if failures:
            _log.warning("the hub is back")
        return 0


def _make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)

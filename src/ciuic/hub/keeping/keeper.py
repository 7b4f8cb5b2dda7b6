"""Backups, rebuilt runs, retention and removal at a running hub. Synchronous; each call may take long."""

import secrets
import shutil
import threading
import time
from pathlib import Path

import structlog

from ciuic.errors import CiuicError, ConflictError, NotFoundError, UsageError
from ciuic.hub.core import Hub
from ciuic.hub.keeping.backup import Capture, capture, drop_leftovers
from ciuic.hub.keeping.rebuild import read_copy, write_ledger
from ciuic.hub.keeping.retention import Keep, collect, remove
from ciuic.hub.membership.records import OPEN_RUN, Announce
from ciuic.hub.run.checks import new_run
from ciuic.job import parse_job
from ciuic.ledger.copy import Committed, LoadedCopy
from ciuic.net.keeping_messages import Collected, RebuiltReply, Removed
from ciuic.units import format_bytes

COLLECT_EVERY_S = 3600.0
FIRST_COLLECT_S = 60.0
SPARE_BYTES = 64 << 20
"""Disk that an upload leaves free."""
UPLOAD = ".upload-"
_log = structlog.get_logger("ciuic.hub")


class Keeping:
    """Works on a hub's folder beside its runs. Thread-safe; one long task of a kind at a time."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.folder = hub.config.folder
        self.keep = Keep(
            events_s=hub.config.keep_events_s, logs_s=hub.config.keep_logs_s, ledgers_s=hub.config.keep_ledgers_s
        )
        self._busy = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hub-keeping", daemon=True)
        drop_leftovers(self.folder)
        for path in self.folder.glob(f"{UPLOAD}*"):
            shutil.rmtree(path, ignore_errors=True)

    # ---- the hub's own schedule

    def start(self) -> None:
        """Forget what is old, now and then."""
        self._thread.start()

    def stop(self) -> None:
        """End the schedule."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        wait_s = FIRST_COLLECT_S
        while not self._stop.wait(wait_s):
            wait_s = COLLECT_EVERY_S
            try:
                self.collect()
            except CiuicError as error:  # a full disk, or a backup in progress: next time
                _log.warning("nothing was forgotten this time", error=str(error))

    # ---- what operators ask for

    def collect(self, by: str = "") -> Collected:
        """Forget what is older than is kept. Raises StorageError, ConflictError."""
        with self._alone("the hub is tidying up"):
            done = collect(self.folder, self._hub.store, self.keep, time.time())
        if done.events or done.log_lines or done.ledgers:
            text = f"{done.events:,} events and {done.log_lines:,} log lines were forgotten"
            text += f", and the logs of {', '.join(done.ledgers)}" if done.ledgers else ""
            text += f" ({format_bytes(done.freed_bytes)})" + (f", asked for by {by}" if by else "")
            self._hub.say(Announce(kind="hub.tidied", text=text))
        return done

    def backup(self, by: str, *, with_authority: bool) -> Capture:
        """What goes into the archive; drop it in the end. Raises ConflictError while another is made, StorageError."""
        with self._alone("another backup is being made"):
            found = capture(self.folder, still=self._hub.shelf.still, with_authority=with_authority)
        kind = "with" if with_authority else "without"
        text = f"{by} makes a backup ({format_bytes(found.size_bytes)}, {kind} the authority's key)"
        self._hub.say(Announce(kind="hub.backup", text=text, data={"bytes": found.size_bytes}))
        return found

    def remove(self, run_id: str, by: str) -> Removed:
        """Files, logs and row of a run that is over. Raises NotFoundError, ConflictError, StorageError."""
        run = self._hub.run(run_id)
        if run.state in OPEN_RUN or self._hub.members(run_id) or self._hub.shelf.peek(run_id) is not None:
            raise ConflictError(
                f"{run_id} cannot be removed", cause=f"it is {run.state} and has files in use", next="stop it first"
            )
        with self._alone("the hub is tidying up"):
            freed = remove(self.folder, run_id)
            text = f"{by} removed {run_id}: {format_bytes(freed)}"
            self._hub.remove_run(run_id, Announce(kind="run.removed", run_id=run_id, text=text))
        return Removed(run_id=run_id, freed_bytes=freed)

    def upload_place(self) -> tuple[Path, int]:
        """(a file for an upload, how many bytes it may have)."""
        folder = self.folder / f"{UPLOAD}{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        return folder / "copy", max(0, (shutil.disk_usage(self.folder).free - SPARE_BYTES) // 2)

    def rebuild(self, path: Path, by: str, *, replace: bool) -> RebuiltReply:
        """A run from an exported copy. Raises ConflictError when there is such a run, FrameError, StorageError."""
        with self._alone("another run is being rebuilt"):
            room_bytes = max(0, shutil.disk_usage(self.folder).free - SPARE_BYTES)
            copy = read_copy(path, path.with_name("unpacked"), room_bytes)
            run_id = copy.about.run_id
            self._make_room(run_id, replace=replace)
            (self.folder / "runs").mkdir(exist_ok=True, mode=0o700)
            done = write_ledger(copy, self.folder / "runs" / run_id)
            self._adopt(copy, done, by)
        return done

    def _make_room(self, run_id: str, *, replace: bool) -> None:
        try:
            run = self._hub.run(run_id)
        except NotFoundError:
            run = None
        place = self.folder / "runs" / run_id
        if run is None and not place.exists():
            return
        state = run.state if run is not None else "not in the hub's records"
        if not replace or (run is not None and (run.state in OPEN_RUN or self._hub.shelf.peek(run_id) is not None)):
            raise ConflictError(
                f"this hub has a run {run_id} already",
                cause=f"it is {state}",
                next="stop it and say --replace: its folder is then moved aside, not removed",
            )
        if place.exists():
            place.rename(place.with_name(f"{run_id}.former-{int(time.time())}"))

    def _adopt(self, copy: LoadedCopy, done: RebuiltReply, by: str) -> None:
        run = new_run(parse_job(copy.about.job), number=0, submit_token="", wall_s=time.time())
        run.run_id, run.state, run.has_trained = done.run_id, "stopped", bool(_total(copy.committed))
        run.reason = f"rebuilt at version {max(done.versions)} from the copy of {done.node_id}"
        text = f"{by} rebuilt {done.run_id} at version {max(done.versions)} from the copy of {done.node_id}"
        text += f": {done.committed:,} of {done.total:,} samples committed; go on with: ciuic resume {done.run_id}"
        self._hub.adopt_run(run, Announce(kind="run.rebuilt", run_id=done.run_id, text=text))

    def _alone(self, what: str) -> "_Alone":
        return _Alone(self._busy, what)


class _Alone:
    """Holds a lock, or says at once that somebody else does."""

    def __init__(self, lock: threading.Lock, what: str) -> None:
        self._lock, self._what = lock, what

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=10.0):
            raise ConflictError(self._what, next="try again in a moment")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _total(committed: Committed | None) -> int:
    return committed.total if committed is not None else 0


def check_yes(run_id: str, said: bool) -> None:
    """Raises UsageError when the caller did not say that it means it."""
    if not said:
        raise UsageError(f"{run_id} was not removed", cause="its last snapshot would be gone", next="say --yes")

"""Rank 0 keeps a copy of the ledger it merges on its node's disk, so that a hub whose disk is lost can be rebuilt.

Training and network threads only put what they have into a queue; one thread of its own writes. Whatever goes wrong
there is told once and never reaches the training: the copy then ends at the version it has.

ledger/0001, 0002 ...   one folder per attachment (see ciuic.ledger.copy); an older one stays while it is ahead
"""

import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ciuic.errors import CiuicError, StorageError
from ciuic.ledger.copy import (
    ABOUT,
    SAMPLES,
    Committed,
    CopyAbout,
    FragmentCopy,
    base_path,
    committed_after,
    load_about,
    newest_version,
    version_0,
)
from ciuic.ledger.files import write_durable, write_parts_durable
from ciuic.ledger.layout import Layout
from ciuic.net import messages as m

if TYPE_CHECKING:
    from ciuic.train.runfile import RunFile

FOLDER = "ledger"
QUEUE_BYTES = 256 << 20
"""What may wait for a slow or full disk, or two entries when they are larger; beyond that the copy ends."""
AGAIN_S = 5.0
"""How long to wait after a failed write, or after the hub did not answer."""
RUNS_KEPT = 3
"""Runs of which this node keeps a copy."""
CLOSE_S = 5.0
_log = logging.getLogger("ciuic.train")


def start_copy(info: "RunFile", layout: Layout) -> "LedgerRecorder | None":
    """The recorder of this attachment; None when the job does not want one (`[fault] keep_ledger`)."""
    if not info.job.fault.keep_ledger:
        return None

    def ask() -> Committed:
        client = info.connect("control")
        try:
            return client.call("GET", f"{m.API}/runs/{info.run_id}/committed", None, Committed)
        finally:
            client.close()

    about = CopyAbout(
        run_id=info.run_id,
        node_id=info.node_id,
        job=info.job.to_dict(),
        layout=msgspec.to_builtins(layout),
        total_samples=0,
    )
    try:
        _forget_old_runs(info.folder)
        return LedgerRecorder(info.folder / FOLDER, about, layout, ask)
    except (CiuicError, OSError) as error:
        _log.warning("this node keeps no copy of the ledger: %s", error)
        return None


def _forget_old_runs(folder: Path) -> None:
    others = [path for path in folder.parent.glob(f"*/{FOLDER}") if path.parent != folder]
    for path in sorted(others, key=lambda path: path.stat().st_mtime)[: -RUNS_KEPT + 1 or None]:
        shutil.rmtree(path, ignore_errors=True)


class LedgerRecorder:
    """See the module. `ask` gets the committed samples from the hub; it is called on the recorder's own thread."""

    def __init__(self, root: Path, about: CopyAbout, layout: Layout, ask: Callable[[], Committed]) -> None:
        """Makes this attachment's folder and starts the thread. Raises StorageError."""
        numbers = [int(path.name) for path in root.glob("[0-9]*") if path.name.isdigit()]
        self.root, self.folder = root, root / f"{max(numbers, default=0) + 1:04d}"
        self._about, self._layout, self._ask = about, layout, ask
        count = layout.fragment_count
        self._fragments = [FragmentCopy(self.folder / f"fragment-{f}", layout, f) for f in range(count)]
        self._queue: queue.SimpleQueue[Callable[[], None] | tuple[int, bytes] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_ended = False
        self._known: Committed | None = None
        """Committed samples at a version that this copy has reached."""
        self._told: Committed | None = None
        """The same at a version that it has not reached yet."""
        self._asks_at_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="ciuic-ledger-copy", daemon=True)
        self._thread.start()

    # ---- training and network threads

    def began(self, fragment: int, base: Any, counters: tuple[int, ...]) -> None:
        """Version 0 is what this worker has; `base`: fp32 [element_count], copied."""
        snapshot = version_0(self._about, self._layout, fragment, base, counters)
        folder = self._fragments[fragment].folder

        def write() -> None:
            write_parts_durable(base_path(folder, 0), snapshot.frame_parts())
            self._fragments[fragment].begin(0)
            if fragment == 0:
                self._known = Committed(version=0, total=0)

        self._queue.put(write)

    def loaded(self, fragment: int, version: int, file: Path) -> None:
        """A snapshot was downloaded into `file`, which now belongs to the copy."""
        place = base_path(self._fragments[fragment].folder, version)
        try:
            file.replace(place)
        except OSError as error:
            self._end(StorageError(f"{file} cannot be moved", cause=str(error)))
            return

        def begin() -> None:
            with place.open("rb") as opened:
                os.fsync(opened.fileno())
            self._fragments[fragment].begin(version)

        self._queue.put(begin)

    def entry(self, fragment: int, frame: "bytes | memoryview") -> None:
        """The next entry of a fragment."""
        if self._is_ended:
            return
        data = bytes(frame)
        with self._lock:
            self._waiting_bytes += len(data)
            waiting_bytes = self._waiting_bytes
        if waiting_bytes > max(QUEUE_BYTES, 2 * len(data)):
            self._end(StorageError("the disk is too slow or full", cause=f"{waiting_bytes >> 20} MiB wait for it"))
        else:
            self._queue.put((fragment, data))

    def caught_up(self, total_samples: int) -> None:
        """Every fragment has its base and the entries there were: from now on the copy counts."""

        def complete() -> None:
            self._about = msgspec.structs.replace(self._about, total_samples=total_samples)
            if self._known is not None:
                self._known = msgspec.structs.replace(self._known, total=total_samples)
            write_durable(self.folder / ABOUT, msgspec.json.encode(self._about))
            self._forget_former()
            self._asks_at_s = 0.0 if self._known is None else self._asks_at_s

        self._queue.put(complete)

    def close(self) -> None:
        """Write what waits, for at most a few seconds."""
        self._queue.put(None)
        self._stop.set()
        self._thread.join(CLOSE_S)

    # ---- its own thread

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except Exception as error:  # noqa: BLE001 - a copy that cannot be kept must not end the training
            self._end(error)
        with suppress(queue.Empty):
            while True:  # the worker may train on for days: what nobody writes any more takes no memory
                self._queue.get_nowait()
        for fragment in self._fragments:
            fragment.close()

    def _work(self) -> bool:
        """One turn: everything that waits. False at the end."""
        frames: dict[int, list[bytes]] = {}
        goes_on = True
        for item in self._waiting():
            if item is None:
                goes_on = False
            elif isinstance(item, tuple):
                frames.setdefault(item[0], []).append(item[1])
            else:
                self._append(frames)
                frames = {}
                self._persistently(item)
        self._append(frames)
        if not self._is_ended:
            self._follow_samples()
        return goes_on and not self._is_ended

    def _waiting(self) -> list[Any]:
        try:
            found: list[Any] = [self._queue.get(timeout=AGAIN_S)]
        except queue.Empty:
            return []
        with suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        return found

    def _append(self, frames: dict[int, list[bytes]]) -> None:
        for number, new in frames.items():
            fragment, left = self._fragments[number], new
            while left:
                count = fragment.until_base(left)
                first, left = left[:count], left[count:]
                self._persistently(lambda f=fragment, n=first: f.append(n))
                with self._lock:
                    self._waiting_bytes -= sum(len(frame) for frame in first)
                if fragment.wants_base and not self._is_ended:
                    self._renew(number)

    def _renew(self, number: int) -> None:
        """The entries have outgrown the base: replay them into a new one."""
        if number == 0:
            self._settle_samples()
            self._known = committed_after(self._known, self._fragments[0].headers()) if self._known else None
            if self._known is not None:
                self._persistently(self._save_samples)
        self._persistently(self._fragments[number].renew_base)
        self._forget_former()

    def _persistently(self, work: Callable[[], None]) -> None:
        """Again and again while the disk refuses. Ends the copy when the worker ends meanwhile."""
        while not self._is_ended:
            try:
                work()
                return
            except (StorageError, OSError) as error:
                _log.warning("the copy of the ledger cannot be written: %s; trying again", error)
                if self._stop.wait(AGAIN_S):
                    self._end(error)

    def _follow_samples(self) -> None:
        """Which samples were committed before the copy began, from the hub; counts once the copy has come that far."""
        self._settle_samples()
        if time.monotonic() < self._asks_at_s or self._stop.is_set():
            return
        try:
            self._told = self._ask()
            self._asks_at_s = float("inf")
        except CiuicError:  # it is away, or has ended the run
            self._asks_at_s = time.monotonic() + AGAIN_S
        self._settle_samples()

    def _settle_samples(self) -> None:
        if self._told is not None and self._told.version <= self._fragments[0].version:
            self._known, self._told = self._told, None
            self._persistently(self._save_samples)

    def _save_samples(self) -> None:
        write_durable(self.folder / SAMPLES, msgspec.json.encode(self._known))

    def _forget_former(self) -> None:
        """Copies of earlier attachments go when this one has come as far; the newest that is ahead stays."""
        former = sorted(path for path in self.root.glob("[0-9]*") if path.name < self.folder.name)
        mine = self._fragments[0].version
        ahead = [path for path in former if load_about(path) is not None and newest_version(path) > mine]
        for path in former:
            if path not in ahead[-1:]:
                shutil.rmtree(path, ignore_errors=True)

    def _end(self, error: Exception) -> None:
        if not self._is_ended:
            self._is_ended = True
            version = self._fragments[0].version
            _log.warning("this node's copy of the ledger ends at version %d: %s", version, error)

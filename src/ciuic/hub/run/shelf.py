"""The ledgers of the runs that are at work: opened when first needed, ticked, closed when the run has ended.

Nobody who holds the lock of the hub's state may call in here: a ledger tells its story (which takes that lock) while
it holds its own.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from ciuic.errors import ConflictError
from ciuic.hub.membership.records import Announce, Run
from ciuic.hub.run.verdict import judge
from ciuic.job import Job, parse_job
from ciuic.ledger.copy import Committed
from ciuic.ledger.files import Spooled
from ciuic.ledger.layout import Layout
from ciuic.ledger.settings import Settings
from ciuic.net.messages import (
    AttachReply,
    AttachRequest,
    DetachRequest,
    EvaluationRequest,
    FragmentState,
    LeaseReply,
    LeaseRequest,
    PushReply,
    ReportRequest,
    RunInfo,
    SyncRequest,
)
from ciuic.net.shard_messages import FragmentReport, RunPart, ShardRun, ShardsInfo
from ciuic.units import format_bytes


class Ledger(Protocol):
    """What the hub needs of hub.rounds.RunLedger."""

    def attach(self, node: str, request: AttachRequest, /) -> AttachReply: ...
    def detach(self, node: str, request: DetachRequest, /) -> None: ...
    def node_gone(self, node: str, /) -> int | None: ...
    def lease(self, node: str, request: LeaseRequest, /) -> LeaseReply: ...
    def push(self, node: str, frame: bytes, spooled: Spooled | None = None, /) -> PushReply: ...
    def put_snapshot(self, node: str, fragment: int, frame: bytes, /) -> None: ...
    def bases(self) -> list[FragmentState]: ...
    def snapshot_path(self, fragment: int, version: int, /) -> Path: ...
    def entries_after(self, fragment: int, version: int, max_bytes: int, /) -> list[bytes]: ...
    def report(self, node: str, report: ReportRequest, /) -> None: ...
    def evaluation(self, node: str, request: EvaluationRequest, /) -> None: ...
    def tick(self) -> float: ...
    def info(self, *, full: bool) -> dict[str, Any]: ...
    def present(self) -> list[str]: ...
    def change(self, request: SyncRequest, by: str, /) -> None: ...
    def knows(self, node: str, /) -> bool: ...
    @property
    def finished(self) -> bool: ...
    @property
    def settings(self) -> Settings: ...
    def switch(self, settings: Settings, /, *, instead_of: Settings | None = None) -> None: ...
    @property
    def layout(self) -> Layout | None: ...
    def close(self) -> None: ...


@runtime_checkable
class Sharded(Protocol):
    """What a ledger offers whose fragments may be at shards (hub.rounds.RunLedger)."""

    sharding: Any

    def part_for(self, shard: str, /) -> RunPart | None: ...
    def shard_run(self) -> ShardRun: ...
    def shard_report(self, shard: str, report: FragmentReport, /) -> int: ...
    def places(self) -> list[str]: ...
    def shards(self, *, rebalance: bool = False) -> ShardsInfo: ...
    def moving_folder(self, fragment: int, shard: str, /) -> Path: ...


@runtime_checkable
class Copied(Protocol):
    """What a ledger offers of which copies are made (hub.rounds.RunLedger)."""

    def still(self) -> AbstractContextManager[Any]: ...
    def committed(self) -> Committed: ...


class OpenLedger(Protocol):
    """RunLedger.open, or a test's own."""

    def __call__(
        self,
        folder: Path,
        job: Job,
        *,
        run_id: str,
        clock: Callable[[], float],
        emit: Callable[[str, str, str, dict[str, Any]], None],
        wake: Callable[[], None],
    ) -> Ledger: ...


class Shelf:
    """Open ledgers by run. Thread-safe; opening one (which replays its files) does not hold up the others."""

    def __init__(
        self,
        folder: Path,
        open_ledger: OpenLedger,
        *,
        say: Callable[[Announce], None],
        wake: Callable[[str], None],
        opened: Callable[[str, Ledger], None],
    ) -> None:
        """`say` gets the lines of ledgers, `wake` the run in which entries or leases changed; both from any thread.

        `opened` is called with each ledger before anybody else gets it.
        """
        self._folder = folder
        self._open_ledger = open_ledger
        self._say = say
        self._wake = wake
        self._opened = opened
        self._lock = threading.Lock()
        self._ledgers: dict[str, Ledger] = {}
        self._doors: dict[str, threading.Lock] = {}

    def get(self, run: Run, *, has_members: bool) -> Ledger:
        """The run's ledger, opened when it is not yet. Raises ConflictError when the run is not at work."""
        is_at_work = run.state in ("running", "stopping") or (run.state == "finished" and has_members)
        with self._lock:
            ledger = self._ledgers.get(run.run_id)
            door = self._doors.setdefault(run.run_id, threading.Lock())
        if not is_at_work:
            raise ConflictError(
                f"{run.run_id} is {run.state}", cause=run.reason, next=f"`ciuic status {run.run_id}` says more about it"
            )
        if ledger is not None:
            return ledger
        with door:
            ledger = self.peek(run.run_id)
            if ledger is None:
                ledger = self._open(run)
                self._opened(run.run_id, ledger)
                with self._lock:
                    self._ledgers[run.run_id] = ledger
            return ledger

    def peek(self, run_id: str) -> Ledger | None:
        """The ledger when it is open."""
        with self._lock:
            return self._ledgers.get(run_id)

    @contextmanager
    def still(self, run_id: str) -> Generator[None]:
        """While this is held, no file of the run changes and nobody opens it."""
        with self._lock:
            door = self._doors.setdefault(run_id, threading.Lock())
        with door:
            ledger = self.peek(run_id)
            with ledger.still() if isinstance(ledger, Copied) else nullcontext():
                yield

    def ledgers(self) -> list[Ledger]:
        """All that are open."""
        with self._lock:
            return list(self._ledgers.values())

    def close(self, run: Run, save: Callable[[RunInfo], object]) -> None:
        """Close the ledger of a run that has ended, after what is known of it was saved; nothing without files.

        One that is not open (the hub was killed just after the run's end) is opened once more for that.
        """
        with self._lock:
            door = self._doors.setdefault(run.run_id, threading.Lock())
        with door:
            ledger = self.peek(run.run_id)
            if ledger is None and (self._folder / run.run_id).exists():
                ledger = self._open(run)
            if ledger is None:
                return
            save(run_info(run, ledger.info(full=True), full=True))
            with self._lock:
                self._ledgers.pop(run.run_id, None)
            ledger.close()

    def close_all(self) -> None:
        """The hub stops."""
        with self._lock:
            ledgers, self._ledgers = self._ledgers, {}
        for ledger in ledgers.values():
            ledger.close()

    def _open(self, run: Run) -> Ledger:
        run_id = run.run_id

        def emit(kind: str, text: str, node_id: str, data: dict[str, Any]) -> None:
            self._say(Announce(kind=kind, text=text, run_id=run_id, node_id=node_id, data=data))

        def wake() -> None:
            self._wake(run_id)

        folder = self._folder / run_id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        job = parse_job(run.job)
        return self._open_ledger(folder, job, run_id=run_id, clock=time.monotonic, emit=emit, wake=wake)


# ---- telling about runs --------------------------------------------------------------------------------------------

_ROW_FIELDS = ("run_id", "name", "state", "created_at", "started_at", "ended_at", "reason", "restarts", "job")
_LEDGER_FIELDS = frozenset(RunInfo.__struct_fields__) - frozenset(_ROW_FIELDS)


def run_info(run: Run, ledger_info: dict[str, Any], *, full: bool) -> RunInfo:
    """A run's row and what its ledger says, as one message.

    Unless `full` without rounds, and with the first and the last evaluation only.
    """
    known = {key: value for key, value in ledger_info.items() if key in _LEDGER_FIELDS}
    if not full:
        points = known.pop("evaluations", [])
        known |= {"rounds": [], "evaluations": [*points[:1], *points[1:][-1:]]}
    row = {name: getattr(run, name) for name in _ROW_FIELDS}
    info = msgspec.convert({**msgspec.to_builtins(known), **row}, RunInfo)
    goes_on = run.state in ("waiting", "running")
    return msgspec.structs.replace(info, verdict=judge(run.run_id, run.failed, run.faults, info.nodes, goes_on=goes_on))


def finish_line(info: RunInfo) -> str:
    """The story of a finished run in one line."""
    parts = [f"{info.samples.committed:,} samples in version {max(info.versions, default=0)}"]
    if info.evaluations:
        last = max(info.evaluations, key=lambda point: point.version)
        parts.append(f"held-out loss {last.loss:.4f}")
    parts.append(f"{format_bytes(info.push_bytes)} pushed, {format_bytes(info.entry_bytes)} of entries")
    if info.loss_consistent is not None:
        parts.append("all nodes agree" if info.loss_consistent else "NODES DO NOT AGREE on the final loss")
    if info.samples.lost or info.samples.duplicated:
        parts.append(f"{info.samples.lost} samples lost, {info.samples.duplicated} duplicated")
    return f"{info.run_id} finished: {'; '.join(parts)}"

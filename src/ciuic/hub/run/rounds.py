"""One run's ledger on the hub: attachments, leases, pushes, rounds. Synchronous, thread-safe, durable first.

The entry log is the only truth; the journal holds what is not in it (incarnations, leases, held-out losses). Killed at
any moment, `RunLedger.open` on the same folder goes on.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from ciuic.errors import (
    CiuicError,
    ConflictError,
    MovedError,
    NotFoundError,
    RoleError,
    StorageError,
    SupersededError,
)
from ciuic.hub.run.attaching import Attaching
from ciuic.hub.run.closing import Closing
from ciuic.hub.run.expert_access import Access
from ciuic.hub.run.fragment_rounds import FragmentRounds, Ground
from ciuic.hub.run.history import History, committed_samples, sample_counts
from ciuic.hub.run.judging import Judging
from ciuic.hub.run.leasing import Leasing, lose
from ciuic.hub.run.live import LiveView
from ciuic.hub.run.members import Member
from ciuic.hub.run.observing import findings_of
from ciuic.hub.run.reopen import reopen
from ciuic.hub.run.settings_source import changed, settings_of
from ciuic.hub.shards.elsewhere import Elsewhere
from ciuic.hub.shards.sharding import Sharding
from ciuic.job import Job
from ciuic.ledger.copy import Committed
from ciuic.ledger.entry import PushHeader, push_from_frame
from ciuic.ledger.files import Spooled
from ciuic.ledger.journal import Departed, Evaluated, Journal, Revived, Switched
from ciuic.ledger.layout import Layout
from ciuic.ledger.samples import SampleLedger
from ciuic.ledger.settings import Settings
from ciuic.net import messages as m
from ciuic.net.shard_messages import FragmentReport, RunPart, RunView, ShardRun, ShardsInfo

Emit = Callable[[str, str, str, dict[str, Any]], None]
Fragment = FragmentRounds | Elsewhere
DETAIL_CHARACTERS = 300


class RunLedger:
    """See the module. `emit(kind, text, node, data)` tells the story; `wake()` says that entries or leases changed."""

    def __init__(
        self, folder: Path, job: Job, *, run_id: str, clock: Callable[[], float], emit: Emit, wake: Callable[[], None]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.job, self.run_id = folder, job, run_id
        self._clock, self._emit, self.wake = clock, emit, wake
        self._lock = threading.RLock()
        self.journal = Journal(folder / "journal.bin")
        self.layout: Layout | None = None
        self.access: Access | None = None
        self.fragments: list[Fragment] = []
        self.members: dict[str, Member] = {}
        self.history = History()
        self.live = LiveView(self)
        self._waits_for: Member | None = None
        self.samples = SampleLedger(0)
        self.settings = settings_of(job)
        self.epoch = 0
        self.started = False
        self.sealed = False
        """Every sample is committed and nobody has progress left; what waits at shards is merged, nothing else."""
        self._attaching = Attaching(self)
        self.judging = Judging(self)
        self.closing = Closing(self)
        self._leasing = Leasing(self)
        self.sharding = Sharding(self)

    @classmethod
    def open(
        cls, folder: Path, job: Job, *, run_id: str, clock: Callable[[], float], emit: Emit, wake: Callable[[], None]
    ) -> "RunLedger":
        """Open or create a run's ledger; replays its files. Raises LedgerDamagedError."""
        ledger = cls(folder, job, run_id=run_id, clock=clock, emit=emit, wake=wake)
        try:
            reopen(ledger)
            ledger._leasing.reopened()
        except CiuicError:
            ledger.close()
            raise
        return ledger

    def set_layout(self, layout: Layout) -> None:
        """Make the fragments' machines and files; those that shards serve are only mirrored."""
        ground = Ground(run_id=self.run_id, job=self.job, layout=layout, clock=self._clock)
        self.fragments = [
            self.sharding.make(f) or FragmentRounds(ground, f, self.settings, self.folder / f"fragment-{f}")
            for f in range(layout.fragment_count)
        ]
        self.layout, self.access = layout, Access(layout)

    def local_fragments(self) -> list[FragmentRounds]:
        """Those that the hub itself serves."""
        return [f for f in self.fragments if isinstance(f, FragmentRounds)]

    def view(self, *, sealed: bool = False) -> RunView:
        """The run as its fragments must see it now, at the hub and at shards."""
        return RunView(
            members={member.node: member.incarnation for member in self.members.values()},
            away=sorted(member.node for member in self.members.values() if member.has_left),
            expected=self.live.expected,
            behind=self.live.behind,
            at_work=self.live.at_work,
            settings=self.settings,
            intervals=self.live.intervals,
            stretches=self.live.stretches,
            epoch=self.epoch,
            total_samples=self.samples.total,
            samples_committed=len(self.samples.committed),
            uploaders=self._attaching.gathering.uploaders(),
            sealed=sealed,
        )

    # ---- settings

    def switch(self, settings: Settings, *, instead_of: Settings | None = None) -> None:
        """From the next round on these hold; pushes that are on their way are still understood.

        `instead_of`: only when these still hold, so that nobody's newer decision is overwritten.
        """
        with self._lock:
            if settings == self.settings or (instead_of is not None and self.settings != instead_of):
                return
            self.journal.append(Switched(settings=settings))
            self.use(settings)
            self.tell("sync.switched", f"from now on: {settings.describe()}", data=msgspec.to_builtins(settings))
        self.closing.due()
        self.wake()

    def change(self, request: m.SyncRequest, by: str) -> None:
        """An operator changes settings. Raises UsageError."""
        with self._lock:
            self.switch(changed(self.settings, request, by, self.job))

    def use(self, settings: Settings) -> None:
        """Make these the present settings (they are durable)."""
        self.settings = settings
        for fragment in self.local_fragments():
            fragment.use(settings)

    def pace(self, node: str) -> m.Pace:
        """What a node's next pushes are like: codec, and steps in proportion to its speed."""
        interval = self.live.intervals.get(node, self.settings.interval)
        return m.Pace(codec_up=self.settings.codec_up, interval=interval)

    def stretches(self) -> list[int]:
        """Intervals between two pushes of each fragment, by how many tokens reach its experts; empty: 1."""
        if self.access is None or not self.access.has_experts:
            return []
        self.access.hear({f.number: f.access for f in self.fragments})
        return self.access.stretches

    # ---- attaching

    def attach(self, node: str, request: m.AttachRequest) -> m.AttachReply:
        """A worker asks for its place. The first one uploads version 0; all wait until min nodes are there."""
        with self._lock:
            self.judging.check(node)
            return self._attaching.attach(node, request, self._clock())

    def put_snapshot(self, node: str, fragment: int, frame: bytes) -> None:
        """Version 0 of a fragment, from the worker that was told to initialize."""
        with self._lock:
            self._attaching.put_snapshot(node, fragment, frame)

    def detach(self, node: str, request: m.DetachRequest) -> None:
        """A worker leaves: its leases go back."""
        with self._lock:
            member = self._current(node, request.incarnation)
            if member.has_left:
                return  # sent again because its reply was lost
            member.leaves(request)
            back = self._depart(member, "done" if request.reason == "finished" else "gone")
            is_behind = request.reason == "behind"
            text = f"{node} cannot catch up and is set aside" if is_behind else f"{node} left the run: {request.reason}"
            if request.detail:
                text += f" ({request.detail[:DETAIL_CHARACTERS]})"
            if back:
                text += f"; {back} leased samples went back"
            self._emit("worker.set_aside" if is_behind else "worker.detached", text, node, {})
        self._after_departure()

    def node_gone(self, node: str) -> int:
        """The node is dead, evicted or left: rounds close without it. Returns how many leased samples went back."""
        with self._lock:
            self._attaching.gathering.leave(node)
            member = self.members.get(node)
            if member is None or not member.is_present:
                return 0
            back = self._depart(member, "gone")
        self._after_departure()
        return back

    def _depart(self, member: Member, state: Literal["done", "gone"]) -> int:
        """Its leases go back; returns how many samples."""
        ranges = tuple(self.samples.give_back(member.node))
        member.state = state
        lose(member, () if member.has_left else ranges)
        self.epoch += 1
        try:
            self.journal.append(Departed(node=member.node, state=state, returned=ranges))
        except StorageError as error:  # if the hub restarts now, it finds out again that the node is gone
            self.closing.problem("departure not noted", error)
        return sum(b - a for a, b in ranges)

    def _after_departure(self) -> None:
        self.closing.due()
        self.wake()

    # ---- leasing

    def lease(self, node: str, request: m.LeaseRequest) -> m.LeaseReply:
        """Samples to train. The same request id gives the same answer again (its reply may have been lost)."""
        with self._lock:
            member = self._current(node, request.incarnation)
            self._revive(member)
            return self._leasing.lease(member, request)

    def is_over(self) -> bool:
        """The run is complete and nobody has progress to push. This is final: a late push makes no other version."""
        self._seal_if_complete()
        is_over = self._is_complete and (self.sealed or not self._someone_has_progress())
        self.sealed = self.sealed or is_over
        return is_over

    @property
    def _is_complete(self) -> bool:
        return self.started and self.samples.complete and all(f.is_quiet for f in self.fragments)

    def _seal_if_complete(self) -> None:
        """With shards the end is agreed: they take no more pushes, merge what waits, and say so."""
        remote = [f for f in self.fragments if isinstance(f, Elsewhere)]
        if self.sealed or not remote or not self.started or not self.samples.complete:
            return
        if all(f.is_quiet for f in self.local_fragments()) and not self._someone_has_progress():
            self.sealed = True
            self.wake()

    def _someone_has_progress(self) -> bool:
        """With several fragments the last samples may be committed while other fragments' progress is unpushed."""
        last = self._waits_for  # as a rule it is still the same one: with N workers that ask, not N looks at each
        if last is None or not (last.unpushed and last.is_present and not last.is_silent):
            busy = (member for member in self.live.roll.at_work(self.epoch) if member.unpushed and not member.is_silent)
            self._waits_for = next(busy, None)
        return self._waits_for is not None

    @property
    def finished(self) -> bool:
        """Every sample is committed and no attached worker is still busy (one that stands still does not count)."""
        with self._lock:
            return self._is_complete and all(member.is_silent for member in self.live.roll.at_work(self.epoch))

    def present(self) -> list[str]:
        """Nodes whose workers count as being in the run."""
        with self._lock:
            return [member.node for member in self.live.roll.at_work(self.epoch)]

    def knows(self, node: str) -> bool:
        """Whether a worker of this node ever took its place in the run."""
        with self._lock:
            return node in self.members

    # ---- pushing

    def push(self, node: str, frame: bytes, spooled: Spooled | None = None) -> m.PushReply:
        """Check, store, acknowledge; closes the round when it was the last one. Raises FrameError, SupersededError."""
        push = push_from_frame(frame)
        header = push.header
        if header.node != node or header.run != self.run_id:
            raise RoleError(
                f"{node} sent a push of {header.node} for run {header.run}", cause="a node pushes only for itself"
            )
        with self._lock:
            fragment = self._local(header.fragment)
            member = self._current(node, header.incarnation)
            self._revive(member)
            try:
                verdict = fragment.push(push, frame, self.live, spooled)
            except StorageError as error:
                self.closing.problem("a push was not stored, and is sent again", error)
                raise
            if verdict.status == "rejected":
                member.pushes_rejected += 1
                self.judging.refused(node, verdict.reason)
                text = f"a push of {node} was rejected ({verdict.reason}): {verdict.detail}"
                self._emit("push.rejected", text, node, {})
            elif verdict.status == "accepted":
                self.closing.written()
                self.accepted(header)
                self.closing.due()
            return m.PushReply(
                status=verdict.status,
                reason=verdict.reason,
                detail=verdict.detail,
                epoch=self.epoch,
                hub_version=fragment.version,
                pace=self.pace(node),
            )

    def accepted(self, header: PushHeader) -> None:
        """A push waits in an inbox of the hub."""
        self.member(header.node).pushes_accepted += 1
        if header.fragment == 0:
            self.samples.accept(header.ranges)

    # ---- rounds

    def tick(self) -> float:
        """Close what is due; seconds until the next call is wanted."""
        with self._lock:
            self._leasing.tick()
            self.judging.settle()
            self.closing.due()
            self._seal_if_complete()
            self.sharding.tick()
            waits = [wait_s for f in self.local_fragments() if (wait_s := f.due_in_s()) is not None]
            return min(1.0, max(0.01, min(waits, default=1.0)))

    # ---- reading

    def entries_after(self, fragment: int, version: int, max_bytes: int) -> list[bytes]:
        """Entry frames after a version; empty when there is none yet."""
        with self._lock:
            return self._local(fragment).entries_after(version, max_bytes)

    def bases(self) -> list[m.FragmentState]:
        """What a joiner may fetch before it attaches. Raises MovedError while a fragment's place is not known."""
        with self._lock:
            return self._attaching.states() if self.started else []

    def snapshot_path(self, fragment: int, version: int) -> Path:
        """File of a snapshot's base frame. Raises NotFoundError."""
        with self._lock:
            return self._local(fragment).snapshot_path(version)

    def report(self, node: str, report: m.ReportRequest) -> None:
        """What a worker tells about itself."""
        with self._lock:
            member = self._current(node, report.incarnation)
            member.take_report(report, [f.version for f in self.fragments], self.history.digests)
            self.live.paces.heard(member)

    def evaluation(self, node: str, request: m.EvaluationRequest) -> None:
        """Held-out loss of the base at a version."""
        with self._lock:
            self._current(node, request.incarnation)
            record = Evaluated(
                node=node,
                version=request.version,
                loss=request.loss,
                samples=request.samples,
                time=time.time(),
                samples_committed=len(self.samples.committed),
                final=request.final,
            )
            self.journal.append(record)
            self.history.evaluated(record)
            text = f"held-out loss at version {request.version}: {request.loss:.4f}"
            self._emit("run.evaluated", text, node, {"loss": request.loss})

    def info(self, *, full: bool) -> dict[str, Any]:
        """The fields of RunInfo that the ledger knows; rounds and all evaluations only when `full`."""
        with self._lock:
            history, intervals = self.history, self.live.intervals
            fields: dict[str, Any] = {
                "versions": [f.version for f in self.fragments],
                "digests": [f.digest for f in self.fragments],
                "parameters": self.layout.parameter_count if self.layout else 0,
                "epoch": self.epoch,
                "nodes": [member.info(self.samples, intervals.get(n, 0)) for n, member in sorted(self.members.items())],
                "sync": self.settings.describe() if self.layout else "",
                "samples": sample_counts(self.samples),
                "push_bytes": history.push_bytes,
                "entry_bytes": history.entry_bytes,
                "loss_consistent": history.loss_consistent([x.final_digests for x in self.members.values()]),
                "progress": len(self.samples.committed) / self.samples.total if self.samples.total else 0.0,
            }
            if full:
                fields |= {**history.full(), "findings": findings_of(self)}
            else:
                fields["evaluations"] = history.evaluations[:1] + history.evaluations[1:][-1:]
            return fields

    # ---- shards

    def part_for(self, shard: str) -> RunPart | None:
        """The run as this shard must see it; None when shards have no part in it."""
        with self._lock:
            return self.sharding.part_for(shard)

    def shard_run(self) -> ShardRun:
        """Job and layout, which a shard needs once. Raises NotFoundError."""
        with self._lock:
            if self.layout is None:
                raise NotFoundError(f"{self.run_id} has no layout yet")
            return ShardRun(job=self.job.model_dump(mode="json"), layout=msgspec.to_builtins(self.layout))

    def shard_report(self, shard: str, report: FragmentReport) -> int:
        """A shard tells what it did; returns the version up to which the hub knows its entries, -1: not its."""
        with self._lock:
            known = self.sharding.report(shard, report) if 0 <= report.fragment < len(self.fragments) else -1
        self.closing.due()
        return known

    def places(self) -> list[str]:
        """Where nodes reach each fragment; empty: at the hub. Raises MovedError while that is not known."""
        with self._lock:
            return [self.sharding.url_of(f) for f in range(len(self.fragments))]

    def shards(self, *, rebalance: bool = False) -> ShardsInfo:
        """Load of each place, now and after the best moves; `rebalance` begins them."""
        with self._lock:
            return self.sharding.info(start=rebalance)

    def moving_folder(self, fragment: int, shard: str) -> Path:
        """Files of a fragment that is going to this shard. Raises NotFoundError, ConflictError."""
        with self._lock:
            self.fragment(fragment)
            return self.sharding.folder_for(fragment, shard)

    def spoke(self, node: str) -> None:
        """A shard heard a node of the present incarnation."""
        member = self.members.get(node)
        if member is not None and not member.has_left and not self.judging.is_aside(node):
            self.heard(member)
            self._revive(member)

    # ---- helpers

    def tell(self, kind: str, text: str, *, node: str = "", data: dict[str, Any] | None = None) -> None:
        """One line of the run's story."""
        self._emit(kind, text, node, data or {})

    def member(self, node: str) -> Member:
        """The member of that name; a new one when there is none."""
        return self.members.get(node) or self.members.setdefault(node, Member(node=node, heard_s=self.now_s))

    def heard(self, member: Member) -> None:
        """Its present worker has said something."""
        self._leasing.heard(member)

    @property
    def now_s(self) -> float:
        """The hub's monotonic clock."""
        return self._clock()

    def _current(self, node: str, incarnation: int) -> Member:
        member = self.members.get(node)
        if member is None or member.incarnation != incarnation:
            newest = member.incarnation if member else 0
            raise SupersededError(
                f"incarnation {incarnation} of {node} is not the present one ({newest})",
                cause="a newer process of this node has taken its place, or the hub was restored from a copy",
                next="this process stops; nothing is lost",
            )
        self.heard(member)
        return member

    def _revive(self, member: Member) -> None:
        """A node that was thought dead speaks again: it is a member again. Raises ConflictError when it has left."""
        self.judging.check(member.node)
        if member.has_left:
            raise ConflictError(
                f"{member.node} has left the run", cause="its worker said goodbye", next="attach again to take part"
            )
        if member.state == "gone":
            self.journal.append(Revived(node=member.node))
            member.state = "warming"
            self.epoch += 1
            self._emit("worker.revived", f"{member.node} speaks again and goes on", member.node, {})

    def fragment(self, number: int) -> Fragment:
        """Raises NotFoundError."""
        if not 0 <= number < len(self.fragments):
            raise NotFoundError(f"there is no fragment {number}", cause=f"the run has {len(self.fragments)}")
        return self.fragments[number]

    def _local(self, number: int) -> FragmentRounds:
        """Raises NotFoundError; MovedError when a shard serves it."""
        fragment = self.fragment(number)
        if isinstance(fragment, Elsewhere):
            raise MovedError(f"fragment {number} is served by shard {fragment.shard}", next="ask the hub where")
        return fragment

    def still(self) -> threading.RLock:
        """While this is held (`with ledger.still():`), no file of the run changes."""
        return self._lock

    def committed(self) -> Committed:
        """Which samples are committed at the present version of fragment 0, for a node's copy of the ledger."""
        with self._lock:
            return committed_samples(self)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self.journal.close()
            for fragment in self.local_fragments():
                fragment.close()

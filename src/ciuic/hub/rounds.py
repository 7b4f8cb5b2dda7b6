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
    NotFoundError,
    RoleError,
    StorageError,
    SupersededError,
)
from ciuic.hub.admission import refusal
from ciuic.hub.attaching import Attaching
from ciuic.hub.fragment import Fragment
from ciuic.hub.history import History, sample_counts
from ciuic.hub.members import Member
from ciuic.hub.pace import balanced_intervals
from ciuic.hub.reopen import reopen
from ciuic.hub.sync import changed, settings_of
from ciuic.job import Job
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import Contributor, Push, Rejection, StepFacts, push_from_frame
from ciuic.ledger.inbox import Inbox, Policy
from ciuic.ledger.journal import Departed, Evaluated, Journal, Leased, Revived, Switched
from ciuic.ledger.layout import Layout
from ciuic.ledger.outer import OuterOptimizer
from ciuic.ledger.samples import SampleLedger
from ciuic.ledger.settings import Settings
from ciuic.ledger.store import FragmentStore
from ciuic.net import messages as m

Emit = Callable[[str, str, str, dict[str, Any]], None]
SNAPSHOT_SHARE = 0.5
"""A snapshot is written when the entries since the last one exceed this share of the base: a joiner's download and a
restart's replay stay bounded."""
MAX_LEASE = 1 << 20
DETAIL_CHARACTERS = 300
SMALL_LEASE = 32
"""Leases are not made smaller than this."""


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
        self.fragments: list[Fragment] = []
        self.members: dict[str, Member] = {}
        self.history = History()
        self.samples = SampleLedger(0)
        self.settings = settings_of(job)
        self.epoch = 0
        self.started = False
        self._attaching = Attaching(self)
        self._storage_problem = ""

    @classmethod
    def open(
        cls, folder: Path, job: Job, *, run_id: str, clock: Callable[[], float], emit: Emit, wake: Callable[[], None]
    ) -> "RunLedger":
        """Open or create a run's ledger; replays its files. Raises LedgerDamagedError."""
        ledger = cls(folder, job, run_id=run_id, clock=clock, emit=emit, wake=wake)
        try:
            reopen(ledger)
        except CiuicError:
            ledger.close()
            raise
        return ledger

    def set_layout(self, layout: Layout) -> None:
        """Make the fragments' machines and files."""
        sync = self.job.sync
        outer = OuterOptimizer(lr=sync.outer_lr, momentum=sync.outer_momentum, delay=sync.outer_delay)
        fragments: list[Fragment] = []
        for number in range(layout.fragment_count):
            aggregator = Aggregator(layout, number, (self.settings.codec_up, self.settings.codec_down), outer)
            store = FragmentStore(self.folder / f"fragment-{number}", aggregator.element_count)
            fragments.append(Fragment(aggregator=aggregator, inbox=Inbox(self._policy()), store=store))
        self.layout, self.fragments = layout, fragments

    def _policy(self) -> Policy:
        sync = self.job.sync
        return Policy(
            kind=self.settings.policy,
            min_fraction=sync.min_fraction,
            max_staleness=sync.max_staleness,
            deadline_s=sync.deadline_s,
        )

    # ---- settings

    def switch(self, settings: Settings) -> None:
        """From the next round on these hold; pushes that are on their way are still understood."""
        with self._lock:
            if settings == self.settings:
                return
            self.journal.append(Switched(settings=settings))
            self.use(settings)
            self.tell("sync.switched", f"from now on: {settings.describe()}", data=msgspec.to_builtins(settings))
        self._close_due()
        self.wake()

    def change(self, request: m.SyncRequest, by: str) -> None:
        """An operator changes settings. Raises UsageError."""
        self.switch(changed(self.settings, request, by))

    def use(self, settings: Settings) -> None:
        """Make these the present settings (they are durable)."""
        self.settings = settings
        for fragment in self.fragments:
            fragment.aggregator.use((settings.codec_up, settings.codec_down))
            fragment.inbox.policy = self._policy()

    def pace(self, node: str) -> m.Pace:
        """What a node's next pushes are like: codec, and steps in proportion to its speed."""
        interval = self._intervals().get(node, self.settings.interval)
        return m.Pace(codec_up=self.settings.codec_up, interval=interval)

    def _intervals(self) -> dict[str, int]:
        step_s = {x.node: x.report.step_s if x.report else 0.0 for x in self._at_work()}
        return balanced_intervals(self.settings.interval, step_s)

    # ---- attaching

    def attach(self, node: str, request: m.AttachRequest) -> m.AttachReply:
        """A worker asks for its place. The first one uploads version 0; all wait until min nodes are there."""
        with self._lock:
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
            member.has_left = True
            back = self._depart(member, "done" if request.reason == "finished" else "gone")
            text = f"{node} left the run: {request.reason}"
            if request.detail:
                text += f" ({request.detail[:DETAIL_CHARACTERS]})"
            if back:
                text += f"; {back} leased samples went back"
            self._emit("worker.detached", text, node, {})
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
        self.epoch += 1
        try:
            self.journal.append(Departed(node=member.node, state=state, returned=ranges))
        except StorageError as error:  # if the hub restarts now, it finds out again that the node is gone
            self._tell_storage("departure not noted", error)
        return sum(b - a for a, b in ranges)

    def _after_departure(self) -> None:
        self._close_due()
        self.wake()

    # ---- leasing

    def lease(self, node: str, request: m.LeaseRequest) -> m.LeaseReply:
        """Samples to train. The same request id gives the same answer again (its reply may have been lost)."""
        with self._lock:
            member = self._current(node, request.incarnation)
            self._revive(member)
            if request.request_id == member.last_request_id and member.last_lease is not None:
                return member.last_lease
            if request.request_id < member.last_request_id:
                raise ConflictError(
                    f"request {request.request_id} of {node} is older than its request {member.last_request_id}",
                    cause="it was delayed on its way; nobody waits for its answer any more",
                )
            member.unpushed = request.unpushed
            if self._is_complete and not self._someone_has_progress():
                versions = [f.aggregator.version for f in self.fragments]
                return m.LeaseReply(status="finished", final_versions=versions)
            step = max(1, min(request.step, MAX_LEASE))
            count = min(max(1, request.count), MAX_LEASE, self._allowance(node, step))
            count -= count % step if count > step else 0
            if count <= 0 or not self.samples.free:
                return m.LeaseReply(status="wait")
            return self._grant(member, request.request_id, count)

    def _grant(self, member: Member, request_id: int, count: int) -> m.LeaseReply:
        node, incarnation = member.node, member.incarnation
        ranges = self.samples.lease(node, count)
        try:
            self.journal.append(Leased(node=node, incarnation=incarnation, request_id=request_id, ranges=tuple(ranges)))
        except StorageError:
            self.samples.give_back(node, ranges)
            raise
        member.last_request_id, member.unpushed = request_id, len(self.fragments) > 1
        member.last_lease = m.LeaseReply(status="granted", ranges=ranges)
        return member.last_lease

    def _allowance(self, node: str, step: int) -> int:
        present = [member.node for member in self.members.values() if member.is_present]
        sharers = max(len(present), self.job.nodes.min)  # the first to attach is not alone for long
        return self.samples.allowance(node, present, sharers=sharers, smallest=max(SMALL_LEASE, step))

    @property
    def _is_complete(self) -> bool:
        return self.started and self.samples.complete and not any(f.inbox.waiting for f in self.fragments)

    def _someone_has_progress(self) -> bool:
        """With several fragments the last samples may be committed while other fragments' progress is unpushed."""
        return any(member.unpushed for member in self._at_work())

    @property
    def finished(self) -> bool:
        """Every sample is committed and no attached worker is still busy."""
        with self._lock:
            return self._is_complete and not any(member.is_present for member in self.members.values())

    def present(self) -> list[str]:
        """Nodes whose workers count as being in the run."""
        with self._lock:
            return [member.node for member in self.members.values() if member.is_present]

    def knows(self, node: str) -> bool:
        """Whether a worker of this node ever took its place in the run."""
        with self._lock:
            return node in self.members

    # ---- pushing

    def push(self, node: str, frame: bytes) -> m.PushReply:
        """Check, store, acknowledge; closes the round when it was the last one. Raises FrameError, SupersededError."""
        push = push_from_frame(frame)
        header = push.header
        if header.node != node or header.run != self.run_id:
            raise RoleError(
                f"{node} sent a push of {header.node} for run {header.run}", cause="a node pushes only for itself"
            )
        with self._lock:
            fragment = self.fragment(header.fragment)
            member = self._current(node, header.incarnation)
            self._revive(member)
            if header.sequence <= member.last_sequence.get(header.fragment, 0):
                return self._push_reply(node, fragment, "duplicate")
            refused = refusal(
                fragment.aggregator,
                push,
                max_staleness=fragment.inbox.policy.max_staleness,
                total_samples=self.samples.total,
            )
            if refused:
                return self._refuse(member, fragment, *refused)
            fragment.store.save_push(push.key, frame)
            late = header.base_version < fragment.aggregator.version
            self.take(fragment, push, late=late)
            self._close_due()
            return self._push_reply(node, fragment, "accepted")

    def _refuse(self, member: Member, fragment: Fragment, reason: str, detail: str) -> m.PushReply:
        member.pushes_rejected += 1
        self._emit("push.rejected", f"a push of {member.node} was rejected ({reason}): {detail}", member.node, {})
        return self._push_reply(member.node, fragment, "rejected", reason, detail)

    def _push_reply(
        self, node: str, fragment: Fragment, status: Any, reason: str = "", detail: str = ""
    ) -> m.PushReply:
        return m.PushReply(
            status=status,
            reason=reason,
            detail=detail,
            epoch=self.epoch,
            hub_version=fragment.aggregator.version,
            pace=self.pace(node),
        )

    def take(self, fragment: Fragment, push: Push, *, late: bool) -> None:
        """A stored push joins the inbox."""
        header = push.header
        member = self.member(header.node)
        if header.incarnation == member.incarnation:
            newest = member.last_sequence.get(header.fragment, 0)
            member.last_sequence[header.fragment] = max(header.sequence, newest)
        member.pushes_accepted += 1
        fragment.inbox.add(push, self._clock(), late=late)
        if header.fragment == 0:
            self.samples.accept(header.ranges)

    # ---- rounds

    def tick(self) -> float:
        """Close what is due; seconds until the next call is wanted."""
        with self._lock:
            self._close_due()
            due = [f.inbox.due_s() for f in self.fragments]
            waits = [at - self._clock() for at in due if at is not None]
            return min(1.0, max(0.01, min(waits, default=1.0)))

    def _close_due(self) -> None:
        with self._lock:
            for number, fragment in enumerate(self.fragments):
                while why := fragment.inbox.decide(self._expected(), self._clock()):
                    if not self._try_close(number, fragment, why) or why != "pushed":
                        break

    def _expected(self) -> list[str]:
        """Members whose push a round waits for: not joiners before their first push, nor nodes without samples."""
        present = self._at_work()
        settled = [member for member in present if member.state == "training"] or present
        return [x.node for x in settled if self.samples.free or self.samples.outstanding(x.node)]

    def _at_work(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_present]

    def _try_close(self, number: int, fragment: Fragment, why: str) -> bool:
        try:
            self._close(number, fragment, why)
        except StorageError as error:
            self._tell_storage("round not closed", error)
            return False
        self._storage_problem = ""
        return True

    def _tell_storage(self, what: str, error: StorageError) -> None:
        """Once per problem, however often it is met."""
        if error.message != self._storage_problem:
            self._storage_problem = error.message
            self._emit("storage.failed", f"{what}: {error}", "", {"code": error.code})

    def _close(self, number: int, fragment: Fragment, why: str) -> None:
        pushes, rejected = fragment.inbox.select(fragment.aggregator.version)
        committed = self.samples.committed.copy()
        if number == 0:
            for push in pushes:
                for start, stop in push.header.ranges:
                    committed.add(start, stop)
        aggregator, inbox = fragment.aggregator, fragment.inbox
        step = self._step_facts(aggregator, pushes, len(committed))
        if step is not None and step.next_phase != step.phase:
            rejected += inbox.leftover(pushes, rejected)
        facts = Facts(
            run=self.run_id,
            epoch=self.epoch,
            samples_committed=len(committed),
            time=time.time(),
            why=why,
            weights=inbox.weights(pushes, aggregator.version, len(self._at_work())),
            step=step,
        )
        candidate = fragment.aggregator.close(pushes, rejected, facts)
        entry_bytes = fragment.store.append(candidate.entry)
        fragment.aggregator.commit(candidate)
        header = candidate.entry.header
        for rejection in rejected:
            self._reject_waiting(fragment, rejection)
        fragment.inbox.settle(p.key for p in pushes)
        for contributor in header.contributors:
            self.count_merged(contributor, number)
        info = self.history.closed(header, entry_bytes)
        self._tell_round(info)
        self._snapshot_if_due(fragment)
        self.wake()

    def _step_facts(self, aggregator: Aggregator, pushes: list[Push], committed: int) -> StepFacts | None:
        """In `gradient` mode: the learning rate of the newest push, and whether the second moment is frozen now."""
        rule = aggregator.layout.step
        if rule is None:
            return None
        newest = max(pushes, key=lambda push: (push.header.base_version, push.key)).header
        progress = committed / self.samples.total if self.samples.total else 0.0
        freeze = aggregator.phase == "frozen" or (rule.freeze_at < 1 and progress >= rule.freeze_at)
        return StepFacts(lr=newest.lr, phase=aggregator.phase, next_phase="frozen" if freeze else "adam")

    def _reject_waiting(self, fragment: Fragment, rejection: Rejection) -> None:
        """An accepted push has become too stale: its samples are its node's again, or free when that one is gone."""
        push = fragment.inbox.remove((rejection.node, rejection.incarnation, rejection.sequence))
        member = self.member(rejection.node)
        member.pushes_rejected += 1
        if rejection.incarnation == member.incarnation and member.is_present:
            self.samples.reject(rejection.node, push.header.ranges)
        else:
            self.samples.release(push.header.ranges)
        self._emit("push.rejected", f"a push of {rejection.node} was rejected ({rejection.reason})", rejection.node, {})

    def count_merged(self, contributor: Contributor, fragment: int) -> None:
        """A push is in an entry."""
        member = self.member(contributor.node)
        member.pushes_merged += 1
        member.staleness = contributor.staleness
        if contributor.incarnation == member.incarnation:
            newest = member.last_sequence.get(fragment, 0)
            member.last_sequence[fragment] = max(newest, contributor.sequence)
            if member.state == "warming":
                member.state = "training"
        if fragment == 0:
            self.samples.commit(contributor.ranges)

    def _tell_round(self, info: m.RoundInfo) -> None:
        late = [f"{n} ({s} behind)" for n, s in zip(info.nodes, info.staleness, strict=True) if s]
        text = f"round {info.version} closed by {info.why}: {', '.join(info.nodes)}; {info.tokens:,} tokens"
        self._emit(
            "round.closed",
            text + (f"; carried: {', '.join(late)}" if late else ""),
            "",
            {"version": info.version, "fragment": info.fragment, "nodes": info.nodes, "why": info.why},
        )

    def _snapshot_if_due(self, fragment: Fragment) -> None:
        since = fragment.store.bytes_since(fragment.snapshot_version)
        if since <= SNAPSHOT_SHARE * 4 * fragment.aggregator.element_count:
            return
        try:
            fragment.store.save_snapshot(fragment.aggregator.snapshot(self.run_id))
            fragment.snapshot_version = fragment.aggregator.version
        except StorageError as error:
            self._emit("storage.failed", f"snapshot not written: {error}", "", {"code": error.code})

    # ---- reading

    def entries_after(self, fragment: int, version: int, max_bytes: int) -> list[bytes]:
        """Entry frames after a version; empty when there is none yet."""
        with self._lock:
            place = self.fragment(fragment)
            if version > place.store.version:
                raise ConflictError(
                    f"the hub has version {place.store.version} of fragment {fragment}, not {version}",
                    cause="the hub was restored from an older copy",
                    next="the worker loads a snapshot again",
                )
            return place.store.entries_after(version, max_bytes)

    def snapshot_path(self, fragment: int, version: int) -> Path:
        """File of a snapshot's base frame. Raises NotFoundError."""
        with self._lock:
            path = self.fragment(fragment).store.snapshot_path(version)
            if not path.exists():
                raise NotFoundError(
                    f"there is no snapshot of version {version}",
                    cause="a newer one has replaced it",
                    next="attach again",
                )
            return path

    def report(self, node: str, report: m.ReportRequest) -> None:
        """What a worker tells about itself."""
        with self._lock:
            member = self._current(node, report.incarnation)
            member.take_report(report)

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
            self._emit(
                "run.evaluated",
                f"held-out loss at version {request.version}: {request.loss:.4f}",
                node,
                {"loss": request.loss},
            )

    def info(self, *, full: bool) -> dict[str, Any]:
        """The fields of RunInfo that the ledger knows; rounds and all evaluations only when `full`."""
        with self._lock:
            history, intervals = self.history, self._intervals()
            fields: dict[str, Any] = {
                "versions": [f.aggregator.version for f in self.fragments],
                "digests": [f.aggregator.digest for f in self.fragments],
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
                fields |= {"rounds": list(history.rounds), "evaluations": list(history.evaluations)}
            else:
                fields["evaluations"] = history.evaluations[:1] + history.evaluations[1:][-1:]
            return fields

    # ---- helpers

    def tell(self, kind: str, text: str, *, node: str = "", data: dict[str, Any] | None = None) -> None:
        """One line of the run's story."""
        self._emit(kind, text, node, data or {})

    def member(self, node: str) -> Member:
        """The member of that name; a new one when there is none."""
        return self.members.setdefault(node, Member(node=node))

    def _current(self, node: str, incarnation: int) -> Member:
        member = self.members.get(node)
        if member is None or member.incarnation != incarnation:
            newest = member.incarnation if member else 0
            raise SupersededError(
                f"incarnation {incarnation} of {node} is not the present one ({newest})",
                cause="a newer process of this node has taken its place",
                next="this process stops; nothing is lost",
            )
        return member

    def _revive(self, member: Member) -> None:
        """A node that was thought dead speaks again: it is a member again. Raises ConflictError when it has left."""
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

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self.journal.close()
            for fragment in self.fragments:
                fragment.store.close()

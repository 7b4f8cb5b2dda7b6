"""One fragment of a run: its inbox, aggregator and files; takes pushes and closes rounds. No sockets, no threads.

The hub serves all fragments of a run with this class, or leaves some of them to shards, which use it too. What is
decided elsewhere (members, settings, samples) comes in as a `RunView` with each call.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ciuic.errors import ConflictError, MovedError, NotFoundError, StorageError
from ciuic.hub.run.admission import check_version_0, refusal
from ciuic.hub.run.expert_access import averaged
from ciuic.hub.run.quarantine import Outliers, clipped_weights, outlier_rule
from ciuic.job import Job
from ciuic.ledger.aggregate import Aggregator, Facts
from ciuic.ledger.entry import EntryHeader, Push, Rejection, StepFacts, snapshot_from_frame
from ciuic.ledger.files import Spooled
from ciuic.ledger.inbox import Inbox, Policy
from ciuic.ledger.layout import Layout
from ciuic.ledger.outer import OuterOptimizer
from ciuic.ledger.replay import Rebuilt, rebuild
from ciuic.ledger.settings import Settings
from ciuic.ledger.snapshots import is_snapshot_due
from ciuic.ledger.store import FragmentStore
from ciuic.net.shard_messages import RunView

if TYPE_CHECKING:
    from ciuic.hub.run.live import LiveView

KEPT_BYTES = 1 << 20
"""A newest entry of up to so many bytes is kept in memory for all who ask for it."""
TOUCHED_SHARE = 0.2
"""Weight of the newest push in `touched`."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What holds for all fragments of a run, for its whole life."""

    run_id: str
    job: Job
    layout: Layout
    clock: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a push: accepted (it is durable), duplicate, or rejected with a reason."""

    status: Literal["accepted", "duplicate", "rejected"]
    reason: str = ""
    detail: str = ""


ACCEPTED, DUPLICATE = Verdict(status="accepted"), Verdict(status="duplicate")


@dataclass(frozen=True, kw_only=True)
class Closed:
    """A round has ended in this entry, which is durable."""

    header: EntryHeader
    entry_bytes: int
    rejected: tuple[tuple[Rejection, Push], ...] = ()
    """Accepted pushes that are not merged after all."""
    missing: tuple[str, ...] = ()
    """Nodes that the round expected and did without."""
    waited_s: float = 0.0
    """How long it would wait for them after its first push."""
    snapshot_bytes: int = 0
    """Of the snapshot that was written after it; 0: none was due."""
    snapshot_problem: str = ""


class FragmentRounds:
    """One fragment, served here."""

    def __init__(self, ground: Ground, number: int, settings: Settings, folder: Path) -> None:
        """Makes the folder when it is not there. Raises StorageError."""
        self.ground, self.number, self.folder = ground, number, folder
        sync = ground.job.sync
        outer = OuterOptimizer(lr=sync.outer_lr, momentum=sync.outer_momentum, delay=sync.outer_delay)
        self.settings = settings
        self.aggregator = Aggregator(ground.layout, number, (settings.codec_up, settings.codec_down), outer)
        self.store = FragmentStore(folder, self.aggregator.element_count)
        self.inbox = Inbox(self._policy())
        self.snapshot_version = -1
        """-1: no version 0 yet."""
        self.sequences: dict[str, tuple[int, int]] = {}
        """(incarnation, newest accepted sequence) of each node."""
        self.touched = 1.0
        """Share of the fragment that a push moves, averaged over the latest ones."""
        self.access: float | None = None
        """How many experts of it a token reaches, averaged over the latest pushes; None: not known."""
        self.outliers = Outliers(outlier_rule(ground.job))
        self._newest: tuple[int, bytes] | None = None
        """(version, frame) of the newest entry once it was asked for: every node asks for it."""
        self.is_frozen = False
        """It is being moved: no pushes, no rounds; reading goes on."""

    def _policy(self) -> Policy:
        sync = self.ground.job.sync
        return Policy(
            kind=self.settings.policy,
            min_fraction=sync.min_fraction,
            max_staleness=sync.max_staleness,
            deadline_s=sync.deadline_s,
        )

    def use(self, settings: Settings) -> None:
        """From the next round on these hold; pushes that are on their way are still understood."""
        if settings != self.settings:
            self.settings = settings
            self.aggregator.use((settings.codec_up, settings.codec_down))
            self.inbox.policy = self._policy()

    def reopen(self) -> Rebuilt | None:
        """Bring the state back from the files; None when there is no version 0 yet. Raises LedgerDamagedError.

        The waiting pushes are in the inbox again.
        """
        if not self.store.snapshot_versions():
            return None
        rebuilt = rebuild(self.aggregator, self.store, self.ground.run_id)
        self.snapshot_version = rebuilt.snapshot_version
        for header in rebuilt.merged:
            self.outliers.merged(header)
            for settled in (*header.contributors, *header.rejected):
                self._note(settled.node, settled.incarnation, settled.sequence)
        for push in rebuilt.inbox:
            self.outliers.wait(push.key, self.aggregator.norm_of(push))
            self._take(push, late=False)
        self.inbox.forget_lateness()  # they all "arrived" just now
        return rebuilt

    # ---- what is known of it

    @property
    def version(self) -> int:
        return self.aggregator.version

    @property
    def digest(self) -> str:
        return self.aggregator.digest

    @property
    def is_quiet(self) -> bool:
        """No push waits for its round."""
        return not self.inbox.waiting

    @property
    def snapshot_bytes(self) -> int:
        """Of the newest snapshot, as nodes download it; 0 before version 0."""
        return self.store.snapshot_path(self.snapshot_version).stat().st_size if self.snapshot_version >= 0 else 0

    # ---- version 0

    def put_version_0(self, node: str, frame: bytes, uploaders: list[str]) -> bool:
        """Version 0, from a node that was told to upload it; False when it was sent again. Raises ConflictError."""
        snapshot = snapshot_from_frame(frame, self.aggregator.element_count)
        is_there = self.snapshot_version >= 0
        if is_there and snapshot.header.digest == self.digest:
            return False  # its reply was lost
        if is_there or node not in uploaders:
            raise ConflictError(
                f"{node} is not the one that uploads version 0 of fragment {self.number}",
                cause="another worker does, or it is there already",
                next="attach again",
            )
        check_version_0(self.aggregator, snapshot)
        self.aggregator.initialize(snapshot.vectors["base"], snapshot.header.counters)
        self.store.save_snapshot(self.aggregator.snapshot(self.ground.run_id))
        self.snapshot_version = 0
        return True

    # ---- pushes

    def push(self, push: Push, frame: bytes, view: "RunView | LiveView", spooled: Spooled | None = None) -> Verdict:
        """Check and store a push of the present incarnation of its node; `spooled`: see FragmentStore.save_push.

        Raises FrameError, StorageError; MovedError while the fragment is being moved.
        """
        header = push.header
        if self.is_frozen:
            raise moving(self.number)
        incarnation, newest = self.sequences.get(header.node, (0, 0))
        if header.incarnation == incarnation and header.sequence <= newest:
            return DUPLICATE
        if view.sealed:
            return Verdict(status="rejected", reason="stale", detail="the run is complete")
        refused = refusal(
            self.aggregator,
            push,
            max_staleness=self.inbox.policy.staleness_limit(view.at_work),
            total_samples=view.total_samples,
        )
        if refused:
            return Verdict(status="rejected", reason=refused[0], detail=refused[1])
        norm = self.aggregator.norm()
        if too_long := self.outliers.refusal(header, norm):
            return Verdict(status="rejected", reason="quarantined", detail=too_long)
        self.touched += TOUCHED_SHARE * (self.aggregator.touched() - self.touched)
        self.access = averaged(self.access, header.accesses, header.tokens)
        self.store.save_push(push.key, frame, spooled)
        self.outliers.wait(push.key, norm)
        self._take(push, late=header.base_version < self.version)
        return ACCEPTED

    def _take(self, push: Push, *, late: bool) -> None:
        """A stored push joins the inbox."""
        self._note(*push.key)
        self.inbox.add(push, self.ground.clock(), late=late)

    def _note(self, node: str, incarnation: int, sequence: int) -> None:
        self.sequences[node] = max(self.sequences.get(node, (0, 0)), (incarnation, sequence))

    # ---- rounds

    def due_in_s(self) -> float | None:
        """Seconds until the deadline of the present round; None before its first push."""
        due_s = self.inbox.due_s()
        return None if due_s is None else due_s - self.ground.clock()

    def close_next(self, view: "RunView | LiveView", committed: Callable[[list[Push]], int]) -> Closed | None:
        """Close the round when it is time; None when it is not. Raises StorageError, and nothing has changed then.

        `committed`: distinct samples of the run that are committed once these pushes are.
        """
        now_s = self.ground.clock()
        if self.is_frozen or not self.inbox.may_close(view.fewest, now_s):
            return None
        expected = self._expected(view)
        why = self.inbox.decide(expected, now_s)
        if not why:
            return None
        missing = tuple(node for node in expected if not self.inbox.has_from(node)) if why == "deadline" else ()
        waited_s, before = self.inbox.deadline_s(), self.snapshot_version
        pushes, rejected = self.inbox.select(self.version, view.at_work)
        samples = committed(pushes)
        step = self._step_facts(pushes, samples, view.total_samples)
        if step is not None and step.next_phase != step.phase:
            rejected += self.inbox.leftover(pushes, rejected)
        marks = self.outliers.marks(push.header for push in pushes)
        facts = Facts(
            run=self.ground.run_id,
            epoch=view.epoch,
            samples_committed=samples,
            time=time.time(),
            why=why,
            stretch=view.stretches[self.number] if self.number < len(view.stretches) else 1,
            weights=clipped_weights(self.inbox.weights(pushes, self.version, view.at_work), marks),
            marks=marks,
            step=step,
        )
        candidate = self.aggregator.close(pushes, rejected, facts)
        entry_bytes = self.store.append(candidate.entry)
        self.aggregator.commit(candidate)
        self.outliers.merged(candidate.entry.header)
        removed = [(r, self.inbox.remove((r.node, r.incarnation, r.sequence))) for r in rejected]
        self.inbox.settle(p.key for p in pushes)
        problem = self._snapshot_if_due()
        return Closed(
            header=candidate.entry.header,
            entry_bytes=entry_bytes,
            rejected=tuple(removed),
            missing=missing,
            waited_s=waited_s,
            snapshot_bytes=self.snapshot_bytes if self.snapshot_version > before else 0,
            snapshot_problem=problem,
        )

    def _expected(self, view: "RunView | LiveView") -> list[str]:
        """Fragment 0 reports the samples: who has none left may still have progress in the other fragments."""
        behind = [node for node, fragments in view.behind.items() if self.number in fragments] if self.number else []
        return sorted({*view.expected, *behind})

    def _step_facts(self, pushes: list[Push], committed: int, total: int) -> StepFacts | None:
        """In `gradient` mode: the learning rate of the newest push, and whether the second moment is frozen now."""
        aggregator = self.aggregator
        rule = aggregator.layout.step
        if rule is None:
            return None
        newest = max(pushes, key=lambda push: (push.header.base_version, push.key)).header
        progress = committed / total if total else 0.0
        freeze = aggregator.phase == "frozen" or (rule.freeze_at < 1 and progress >= rule.freeze_at)
        return StepFacts(lr=newest.lr, phase=aggregator.phase, next_phase="frozen" if freeze else "adam")

    def _snapshot_if_due(self) -> str:
        """Returns what went wrong; the entry is durable in any case."""
        since = self.store.bytes_since(self.snapshot_version)
        if not is_snapshot_due(since, self.aggregator.element_count):
            return ""
        try:
            self.store.save_snapshot(self.aggregator.snapshot(self.ground.run_id))
            self.snapshot_version = self.version
        except StorageError as error:
            return str(error)
        return ""

    # ---- reading

    def entries_after(self, version: int, max_bytes: int) -> list[bytes]:
        """Entry frames after a version; empty when there is none yet. Raises ConflictError."""
        if version > self.store.version:
            raise ConflictError(
                f"the hub has version {self.store.version} of fragment {self.number}, not {version}",
                cause="the hub was restored from an older copy",
                next="the worker loads a snapshot again",
            )
        newest = self.store.version
        if version + 1 != newest:
            return self.store.entries_after(version, max_bytes)
        if self._newest is None or self._newest[0] != newest:
            (frame,) = self.store.entries_after(version, max_bytes)
            if len(frame) > KEPT_BYTES:
                return [frame]
            self._newest = newest, frame
        return [self._newest[1]]

    def headers_after(self, version: int, limit: int) -> list[tuple[EntryHeader, int]]:
        """Headers of the entries after a version with the bytes of their frames, oldest first, at most `limit`."""
        stop = min(self.store.version, version + limit)
        return [(self.store.entry(v).header, self.store.entry_bytes(v)) for v in range(version + 1, stop + 1)]

    def snapshot_path(self, version: int) -> Path:
        """File of a snapshot's base frame. Raises NotFoundError."""
        path = self.store.snapshot_path(version)
        if not path.exists():
            raise NotFoundError(
                f"there is no snapshot of version {version}",
                cause="a newer one has replaced it",
                next="attach again",
            )
        return path

    def close(self) -> None:
        """Close the files."""
        self.store.close()


def moving(number: int) -> MovedError:
    """The answer to a push of a fragment that is on its way to another place."""
    return MovedError(f"fragment {number} is being moved", cause="it is served elsewhere in a moment", next="try again")

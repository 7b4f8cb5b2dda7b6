"""The ledger inside one worker: rank 0 of a node owns it. Pushes, merges, leases, evaluation, the end.

Called by the training thread at step boundaries only; everything that waits for the network is in the courier.
"""

import logging
import math
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import torch

from ciuic.errors import ConflictError, NonFiniteError, ProtocolError
from ciuic.ledger.entry import Entry, Snapshot, SnapshotHeader, base_digest, entry_from_frame, snapshot_from_frame
from ciuic.ledger.frame import split_frames
from ciuic.ledger.intervals import Range
from ciuic.ledger.node import NodeMachine, Place
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.net.tls import Purpose
from ciuic.train.courier import Answered, Arrived, Courier, Failed, Item, persistently, post
from ciuic.train.leases import Leases
from ciuic.train.meter import Meter
from ciuic.train.overlap import WaitRule
from ciuic.train.runfile import RunFile
from ciuic.train.state import ModelState

DetachReason = Literal["finished", "drained", "stopped", "failed"]
REPORT_S = 1.0
AHEAD_S = 30.0
"""Samples for so long are leased ahead, so that a node trains on while the hub is away."""
ATTACH_AGAIN_S = 0.3
DRAIN_S = 5.0
"""A draining worker waits so long for its last push to merge, when there is more to push."""
NON_FINITE_LIMIT = 3
"""So many non-finite pushes in a row fail the worker."""
_log = logging.getLogger("ciuic.train")


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What the hub wants to know of this node's data."""

    samples: int
    """0 for a stream."""
    digest: str = ""
    samples_per_step: int = 1
    """Of the whole node (all ranks)."""


@dataclass(kw_only=True)
class Engine:
    """Ledger state of this worker."""

    info: RunFile
    state: ModelState
    meter: Meter
    data: DataFacts
    connect: Callable[[Purpose], HubClient]
    evaluate: Callable[[], tuple[float, int]] | None = None
    draining: bool = False
    machine: NodeMachine = field(init=False)
    courier: Courier = field(init=False)
    leases: Leases = field(init=False)
    total_samples: int = 0
    samples_committed: int = 0
    """Of the whole run, as of the last merged entry."""
    loss: "torch.Tensor | float | None" = None
    """Latest training loss the loop reported (read from its device only when it is sent)."""
    _rule: WaitRule = field(init=False)
    _pushed_at_s: float = 0.0
    _worked_since_s: float = 0.0
    moments_are_void: bool = False
    """Progress was not finite: every rank of the node must reset its inner optimizer."""
    _initialized: bool = False
    _initial_loss: tuple[float, int] | None = None
    _least_ahead: int = 1
    _in_a_row: int = 0
    _drain_since_s: float = 0.0
    _acknowledged: int = 0
    """Sequence of the newest push that the hub has stored."""
    _evaluations: "queue.Queue[m.EvaluationRequest]" = field(default_factory=queue.Queue)

    @property
    def progress(self) -> float:
        """0..1: committed samples of the whole run."""
        return self.samples_committed / self.total_samples if self.total_samples else 0.0

    # ---- the beginning

    def attach(self) -> None:
        """Take this worker's place, load the newest base into the model, start the threads."""
        sync = self.info.job.sync
        self._rule = WaitRule(mode=sync.overlap)
        self.courier = Courier(connect=self.connect, run_id=self.info.run_id)
        client = self.connect("control")
        theta = self.state.gather()
        initial = base_digest(self.state.vectors.to_host(theta), self.state.counters())
        reply = self._take_place(client, initial)
        place = Place(run=self.info.run_id, node=self.info.node_id, incarnation=reply.incarnation, epoch=reply.epoch)
        codecs = (sync.codec_up, sync.codec_down)
        self.machine = NodeMachine(self.state.layout, self.state.vectors, codecs, place)
        self.total_samples, self.samples_committed = reply.total_samples, reply.samples_committed
        self._load(reply.fragments[0], initial)
        self._catch_up(client)
        self.state.scatter()
        client.close()
        step = self.data.samples_per_step
        chunk = step * sync.interval
        self._least_ahead = chunk + 2 * step
        self.leases = Leases(self.info.run_id, reply.incarnation, chunk=chunk, ahead=self._least_ahead, step=step)
        self.courier.start([r.version for r in self.machine.replicas])
        self.courier.control("leases", lambda c: self.leases.loop(c, self.courier.stop))
        self.courier.control("reports", self._report_loop)
        if self._initial_loss is not None:
            self._tell_loss(0, self._initial_loss, final=False)
        self._worked_since_s = time.perf_counter()
        _log.info("attached to %s at version %d", self.info.run_id, self.machine.replicas[0].version)

    def _take_place(self, client: HubClient, initial: str) -> m.AttachReply:
        request = m.AttachRequest(
            layout=msgspec.to_builtins(self.state.layout),
            frozen_digest=self.state.frozen_digest,
            dataset_samples=self.data.samples,
            data_digest=self.data.digest,
            torch_version=str(torch.__version__),
            device=str(self.state.device),
        )
        told = False
        while True:
            reply: m.AttachReply = persistently(
                lambda: post(client, self.info.run_id, "attach", request, m.AttachReply),
                stop=self.courier.stop,
                what="attaching",
            )
            if reply.state == "ready":
                return reply
            if reply.state == "initialize":
                self._initialize(initial)
                continue
            if not told:
                _log.info("waiting for %d nodes to start together", self.info.job.nodes.min)
                told = True
            time.sleep(ATTACH_AGAIN_S)

    def _initialize(self, digest: str) -> None:
        """Upload version 0 and evaluate it, while the model holds it."""
        try:
            self._upload(digest)
        except ConflictError as error:  # it is there already: another worker's, or ours and the answer was lost
            _log.info("version 0 was not taken: %s", error)
            return
        self._initialized = True
        if self.evaluate is not None:
            self._initial_loss = self.evaluate()

    def _upload(self, digest: str) -> None:
        header = SnapshotHeader(
            run=self.info.run_id,
            fragment=0,
            version=0,
            layout_digest=self.state.layout.digest,
            digest=digest,
            parts=("base",),
            counters=self.state.counters(),
        )
        frame = Snapshot(header=header, vectors={"base": self.state.vectors.to_host(self.state.theta)}).to_frame()
        path = f"{m.API}/runs/{self.info.run_id}/snapshot?fragment=0&version=0"
        client = self.connect("snapshots")
        persistently(
            lambda: client.send_frame(path, frame, m.Ok, method="PUT"),
            stop=self.courier.stop,
            what="uploading version 0",
        )
        client.close()

    def _load(self, fragment: m.FragmentState, initial: str) -> None:
        """theta = the newest base that costs least: what we have when it is the same, else the snapshot."""
        if fragment.version == 0 and fragment.digest == initial:
            self.state.theta[:] = self.machine.load(
                0, self.state.vectors.to_host(self.state.theta), 0, self.state.counters()
            )
            return
        file = Path(self.info.folder) / f"snapshot-{fragment.snapshot_version}.frame"
        path = f"{m.API}/runs/{self.info.run_id}/snapshot?fragment=0&version={fragment.snapshot_version}"
        client = self.connect("snapshots")
        persistently(
            lambda: client.download(path, file, fragment.snapshot_bytes),
            stop=self.courier.stop,
            what="downloading the snapshot",
        )
        client.close()
        snapshot = snapshot_from_frame(file.read_bytes(), len(self.state.theta))
        file.unlink()
        if snapshot.header.layout_digest != self.state.layout.digest:
            raise ProtocolError("the snapshot is for another layout")
        base, version = snapshot.vectors["base"], fragment.snapshot_version
        self.state.theta[:] = self.machine.load(0, base, version, snapshot.header.counters)
        if self.machine.replicas[0].digest != snapshot.header.digest:
            raise ProtocolError(f"the snapshot of version {version} has another digest than its header says")
        self.state.raise_counters(snapshot.header.counters)

    def _catch_up(self, client: HubClient) -> None:
        """Apply all entries there are, before the first step."""
        while True:
            version = self.machine.replicas[0].version
            path = f"{m.API}/runs/{self.info.run_id}/entries?fragment=0&after={version}&wait_s=0"
            data = persistently(lambda p=path: client.fetch(p), stop=self.courier.stop, what="catching up")
            if not data:
                return
            for frame in split_frames(data, "entry"):
                self._apply(entry_from_frame(frame))

    # ---- step boundaries

    def stepped(self, tokens: int, ranges: list[Range]) -> None:
        """One inner step over these samples has moved the model."""
        self.machine.stepped(tokens, ranges)

    def boundary(self) -> bool:
        """Merge what has arrived, push when it is time. True when the model changed."""
        changed = self._process_arrivals()
        if self.machine.can_push(0, self._target_tokens()):
            changed = self._push() or changed
            changed = self._wait_for_entry() or changed
        return changed

    def _target_tokens(self) -> int:
        """Tokens of `interval` steps, as this worker's steps are."""
        per_step = self.meter.tokens / max(1, self.meter.steps)
        return int(self.info.job.sync.interval * per_step - per_step / 2)

    def _samples_in(self, seconds: float) -> int:
        """How many samples this node trains in that time."""
        step_s = self.meter.step_s
        return int(self.data.samples_per_step * seconds / step_s) if step_s > 0 else 0

    def _process_arrivals(self, timeout_s: float = 0.0) -> bool:
        """Everything that has arrived; waits up to `timeout_s` for the first item."""
        changed = False
        while True:
            try:
                item = self.courier.arrivals.get(timeout=timeout_s) if timeout_s else self.courier.arrivals.get_nowait()
            except queue.Empty:
                if changed:
                    self.state.scatter()
                return changed
            timeout_s = 0.0
            if isinstance(item, Arrived) and not changed:
                self.state.gather()
                changed = True
            self._process(item)

    def _process(self, item: Item) -> None:
        if isinstance(item, Failed):
            raise item.error
        if isinstance(item, Answered):
            if item.reply.status == "rejected":
                _log.warning("a push was rejected (%s): %s", item.reply.reason, item.reply.detail)
                self.machine.rejected(item.fragment, item.sequence)
            else:
                self._acknowledged = item.sequence
            return
        replica = self.machine.replicas[item.entry.header.fragment]
        waits = replica.in_flight is not None
        self._merge(item.entry)
        if waits and replica.in_flight is None:
            self._rule.observe_flight(item.at_s - self._pushed_at_s)

    def _apply(self, entry: Entry) -> None:
        """theta (gathered) and base move to the entry's version."""
        self.machine.merge(entry, self.state.theta)
        self.state.raise_counters(entry.header.counters)
        self.samples_committed = entry.header.samples_committed

    def _merge(self, entry: Entry) -> None:
        """Apply an entry; evaluate its base when it is this node's turn."""
        self._apply(entry)
        header = entry.header
        every = self.info.job.train.evaluate_every
        if every and header.version % every == 0:
            names = [c.node for c in header.contributors]
            if names[header.version // every % len(names)] == self.info.node_id:
                self._evaluate(header.version, final=False)

    def _push(self) -> bool:
        """Send the progress since the last push. True when the model changed (non-finite progress was given up)."""
        theta = self.state.gather()
        now = time.perf_counter()
        self._rule.observe_round(now - self._worked_since_s)
        try:
            push = self.machine.push(0, theta, self.state.counters())
        except NonFiniteError as error:
            self._give_up(error)
            return True
        self._in_a_row = 0
        self._pushed_at_s = self._worked_since_s = time.perf_counter()
        self.meter.pushes += 1
        self.leases.ahead = max(self._least_ahead, self._samples_in(AHEAD_S))
        self.courier.send(push)
        return False

    def _give_up(self, error: NonFiniteError) -> None:
        self._in_a_row += 1
        _log.warning("%s; training goes on from version %d", error, self.machine.replicas[0].version)
        if self._in_a_row >= NON_FINITE_LIMIT:
            raise error
        self.leases.put_back(self.machine.discard(0, self.state.theta))
        self.state.scatter()
        self.moments_are_void = True

    def _wait_for_entry(self) -> bool:
        """Wait for the entry of the push just made, while that is cheaper than going on without it."""
        began = time.perf_counter()
        until = began + self._rule.budget_s()
        changed = False
        while self.machine.replicas[0].in_flight is not None and not self.draining:
            left = until - time.perf_counter()
            if left <= 0:
                break
            changed = self._process_arrivals(min(left, 0.5)) or changed
        self._worked_since_s = time.perf_counter()
        self.meter.stalled(self._worked_since_s - began)
        return changed

    # ---- waiting for samples, draining, the end

    def wait_step(self, timeout_s: float = 0.1) -> tuple[str, bool]:
        """One turn of waiting between batches: (`work`, `again` or `end`, whether the model changed)."""
        fresh = not self.meter.steps and self.machine.replicas[0].version == 0
        if fresh and self._initialized and self._initial_loss is None:
            self._initialized = False
            self._evaluate(0, final=False)  # on_evaluate came after prepare
        if self.draining:
            changed = self._process_arrivals(timeout_s if self.machine.replicas[0].in_flight else 0.0)
            return self._drained_step(changed)
        if self.leases.has_samples:
            return "work", False
        changed = self._process_arrivals()
        if self.leases.is_complete:
            return self._complete_step(changed, timeout_s)
        if self.machine.can_push(0, 1) and not self.leases.may_come:
            changed = self._push() or changed
        self.leases.wait(timeout_s)
        return "again", changed

    def _drained_step(self, changed: bool) -> tuple[str, bool]:
        if self.machine.can_push(0, 1):
            return "again", self._push() or changed
        flight = self.machine.replicas[0].in_flight
        if flight is None:
            return "end", changed
        self._drain_since_s = self._drain_since_s or time.perf_counter()
        is_late = time.perf_counter() - self._drain_since_s > DRAIN_S
        is_stored = flight.sequence <= self._acknowledged  # durable on the hub: it merges without us
        nothing_left = self.machine.unpushed_tokens() == 0
        return ("end" if is_stored and (nothing_left or is_late) else "again"), changed

    def _complete_step(self, changed: bool, timeout_s: float) -> tuple[str, bool]:
        final = (self.leases.final_versions or [0])[0]
        if self.machine.replicas[0].version < final:
            return "again", self._process_arrivals(timeout_s) or changed
        self.state.theta[:] = self.machine.replicas[0].base
        self.state.scatter()
        return "end", True

    def finish(self) -> None:
        """The last words: final loss and digests when the run is complete, then leave."""
        complete = self.leases.is_complete and not self.draining
        self.meter.end()
        if complete:
            self._evaluate(self.machine.replicas[0].version, final=True)
        self.leave("finished" if complete else "drained")

    def leave(self, reason: DetachReason, detail: str = "") -> None:
        """Send what is left to say, detach, stop the threads."""
        client = self.connect("control")
        try:
            self._send_evaluations(client)
            final = reason == "finished"
            self._send(client, "report", self.report(final=final))
            incarnation = self.machine.place.incarnation
            self._send(
                client,
                "detach",
                m.DetachRequest(incarnation=incarnation, reason=reason, detail=detail),
            )
        finally:
            client.close()
            self.courier.close()

    def _send(self, client: HubClient, what: str, message: msgspec.Struct) -> None:
        persistently(lambda: post(client, self.info.run_id, what, message), stop=self.courier.stop, what=what)

    # ---- evaluation and reports

    def _evaluate(self, version: int, *, final: bool) -> None:
        """Held-out loss of the base at this version. theta is gathered (or equal to the model) when this is called."""
        if self.evaluate is None:
            return
        base = self.machine.replicas[0].base
        with self.meter.communicating(), self.meter.evaluating(), self.state.holding(base):
            result = self.evaluate()
        self._tell_loss(version, result, final=final)

    def _tell_loss(self, version: int, result: tuple[float, int], *, final: bool) -> None:
        loss, samples = result
        if not math.isfinite(loss):
            _log.warning("the held-out loss of version %d is %s; it is not reported", version, loss)
            return
        self._evaluations.put(
            m.EvaluationRequest(
                incarnation=self.machine.place.incarnation, version=version, loss=loss, samples=samples, final=final
            )
        )

    def _report_loop(self, client: HubClient) -> None:
        while not self.courier.stop.wait(REPORT_S):
            self._send_evaluations(client)
            self._send(client, "report", self.report(final=False))
            self.courier.cpu_s["reports"] = time.thread_time()

    def _send_evaluations(self, client: HubClient) -> None:
        while True:
            try:
                evaluation = self._evaluations.get_nowait()
            except queue.Empty:
                return
            self._send(client, "evaluation", evaluation)

    def report(self, *, final: bool) -> m.ReportRequest:
        """What this worker says about itself."""
        meter = self.meter
        return m.ReportRequest(
            incarnation=self.machine.place.incarnation,
            step=meter.steps,
            samples=meter.samples,
            tokens=meter.tokens,
            loss=None if self.loss is None else float(self.loss),
            base_versions=[r.version for r in self.machine.replicas],
            wall_s=meter.wall_s,
            compute_s=meter.compute_s,
            communication_s=meter.communication_s,
            communication_cpu_s=meter.communication_cpu_s + sum(self.courier.cpu_s.values()) + self.leases.cpu_s,
            data_s=meter.data_s,
            longest_stall_s=meter.longest_stall_s,
            step_s=meter.step_s,
            pushes=meter.pushes,
            final_digests=[r.digest for r in self.machine.replicas] if final else [],
        )

"""The ledger inside one worker: rank 0 of a node owns it. Pushes, merges, leases, evaluation, the end.

Called by the training thread at step boundaries only; everything that waits for the network is in the courier.
"""

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from ciuic.errors import CannotCatchUpError, NonFiniteError, RunFailedError
from ciuic.ledger.entry import Entry
from ciuic.ledger.intervals import Range
from ciuic.ledger.node import NodeMachine
from ciuic.net import messages as m
from ciuic.train.approach import Approach
from ciuic.train.catching import Lateness
from ciuic.train.courier import Answered, Arrived, Courier, Failed, Item
from ciuic.train.entrance import DataFacts, Entrance
from ciuic.train.leases import Leases
from ciuic.train.meter import Meter
from ciuic.train.overlap import WaitRule
from ciuic.train.runfile import RunFile
from ciuic.train.state import ModelState
from ciuic.train.telling import Telling

DetachReason = Literal["finished", "drained", "stopped", "failed", "behind"]
PASSING = ("stale", "ahead")
"""Reasons for which a later push is accepted."""
REFUSED_LIMIT = 3
"""So many pushes in a row that are refused for another reason fail the worker."""
DRAIN_S = 5.0
"""A draining worker waits so long for its last pushes to merge, when there is more to push."""
NON_FINITE_LIMIT = 3
"""So many non-finite pushes in a row fail the worker."""
_log = logging.getLogger("ciuic.train")


@dataclass(kw_only=True)
class Turn:
    """When a fragment is pushed next, and what its flights took."""

    next_step: int
    """The meter's step at whose boundary it is due."""
    rule: WaitRule
    skips: int = 0
    """So many intervals more it is not pushed: few tokens reach its experts."""
    pushed_at_s: float = 0.0
    worked_since_s: float = 0.0
    acknowledged: int = 0
    """Sequence of the newest push that the hub has stored."""
    not_finite: int = 0
    """Pushes in a row that could not be made because progress was not finite."""
    refused: int = 0
    """Pushes in a row that the hub will not take, however often they are sent."""
    lateness: Lateness = field(default_factory=Lateness)


@dataclass(kw_only=True)
class Engine:
    """Ledger state of this worker."""

    info: RunFile
    state: ModelState
    meter: Meter
    data: DataFacts
    approach: Approach
    evaluate: Callable[[], tuple[float, int]] | None = None
    draining: bool = False
    machine: NodeMachine = field(init=False)
    courier: Courier = field(init=False)
    leases: Leases = field(init=False)
    telling: Telling = field(init=False)
    interval: int = field(init=False)
    """Inner steps per push of this node, as the hub last said."""
    total_samples: int = 0
    samples_committed: int = 0
    """Of the whole run, as of the last merged entry."""
    loss: "torch.Tensor | float | None" = None
    """Latest training loss the loop reported (read from its device only when it is sent)."""
    moments_are_void: bool = False
    """Progress was not finite: every rank of the node must reset its inner optimizer."""
    _entrance: Entrance = field(init=False)
    _turns: list[Turn] = field(default_factory=list)
    _initialized: bool = False
    _initial_loss: tuple[float, int] | None = None
    _least_ahead: int = 1
    _drain_since_s: float = 0.0
    _set_aside: str = ""  # why this node cannot keep up

    @property
    def progress(self) -> float:
        """0..1: committed samples of the whole run."""
        return self.samples_committed / self.total_samples if self.total_samples else 0.0

    # ---- the beginning

    def attach(self) -> None:
        """Take this worker's place, load the newest base into the model, start the threads."""
        self.courier = Courier(connect=self.approach.connect, run_id=self.info.run_id)
        self._entrance = Entrance(
            info=self.info,
            state=self.state,
            data=self.data,
            approach=self.approach,
            courier=self.courier,
            uploaded=self._evaluate_version_0,
            placed=self._placed,
        )
        reply, self.machine = self._entrance.enter()
        self.total_samples, self.samples_committed = reply.total_samples, reply.samples_committed
        self._start()
        _log.info("attached to %s at version %d", self.info.run_id, self.machine.replicas[0].version)

    def _placed(self, reply: m.AttachReply) -> None:
        """It has its place and its bases: samples are asked for while the newest entries are applied."""
        self.interval, step = reply.pace.interval if reply.pace else 1, self.data.samples_per_step
        chunk = step * self.interval
        self._least_ahead = chunk + 2 * step
        run_id, incarnation = self.info.run_id, reply.incarnation
        self.leases = Leases(run_id, incarnation, chunk=chunk, ahead=self._least_ahead, step=step)
        self.leases.fragments = self.state.layout.fragment_count
        self.leases.ask_ahead(self.approach.connect("control"))

    def _start(self) -> None:
        run_id, now_s = self.info.run_id, time.perf_counter()
        fragments = len(self.machine.replicas)
        joins = self.machine.replicas[0].version > 0  # the others wait for it from its first merged push on
        self._turns = [
            Turn(
                next_step=1 if joins and f == 0 else max(1, self.interval * (f + 1) // fragments),  # staggered
                rule=WaitRule(mode=self.info.job.sync.overlap, parts=fragments),
                worked_since_s=now_s,
            )
            for f in range(fragments)
        ]
        self.leases.asked_ahead()
        self.telling = Telling(
            run_id=run_id,
            machine=self.machine,
            meter=self.meter,
            courier=self.courier,
            loss=lambda: None if self.loss is None else float(self.loss),
            other_cpu_s=lambda: self.leases.cpu_s,
        )
        self.courier.start([r.version for r in self.machine.replicas])
        self.courier.control("leases", lambda c: self.leases.loop(c, self.courier.stop))
        self.courier.control("reports", self.telling.loop)
        if self._initial_loss is not None:
            self.telling.evaluated(0, self._initial_loss, final=False)

    def _evaluate_version_0(self) -> None:
        self._initialized = True
        if self.evaluate is not None:
            self._initial_loss = self.evaluate()

    # ---- step boundaries

    def stepped(self, tokens: int, ranges: list[Range]) -> None:
        """One inner step over these samples has moved the model."""
        self.machine.stepped(tokens, ranges)

    def boundary(self) -> bool:
        """Merge what has arrived, push what is due. True when the model changed."""
        self._look_ahead()
        changed = self._process_arrivals()
        for fragment, turn in enumerate(self._turns):
            if self.meter.steps >= turn.next_step and self.machine.can_push(fragment, 1):
                if turn.skips > 0:
                    turn.skips, turn.next_step = turn.skips - 1, self.meter.steps + self.interval
                    continue
                changed = self._push(fragment) or changed
                changed = self._wait_for_entry(fragment) or changed
        return changed

    def _look_ahead(self) -> None:
        """Lease for as long as the hub may be away, at the pace of this node."""
        step_s = self.leases.step_s = self.meter.step_s
        samples = int(self.data.samples_per_step * self.info.job.fault.outage_s / step_s) if step_s > 0 else 0
        self.leases.ahead = max(self._least_ahead, samples)

    def _process_arrivals(self, timeout_s: float = 0.0) -> bool:
        """Everything that has arrived; waits up to `timeout_s` for the first item. True when the model changed."""
        gathered: set[int] = set()
        while True:
            try:
                item = self.courier.arrivals.get(timeout=timeout_s) if timeout_s else self.courier.arrivals.get_nowait()
            except queue.Empty:
                for fragment in sorted(gathered):
                    self.state.scatter(fragment)
                return bool(gathered)
            timeout_s = 0.0
            if isinstance(item, Arrived) and (fragment := item.entry.header.fragment) not in gathered:
                self.state.gather(fragment)
                gathered.add(fragment)
            self._process(item)

    def _process(self, item: Item) -> None:
        if isinstance(item, Failed):
            raise item.error
        if isinstance(item, Answered):
            self._answered(item)
            return
        fragment = item.entry.header.fragment
        replica, turn = self.machine.replicas[fragment], self._turns[fragment]
        waits = replica.in_flight is not None
        self._merge(item.entry)
        if waits and replica.in_flight is None:
            turn.rule.observe_flight(item.at_s - turn.pushed_at_s)
            turn.skips = item.entry.header.stretch - 1  # as all nodes of that round

    def _answered(self, item: Answered) -> None:
        if item.reply.pace is not None:
            self.machine.use(item.reply.pace.codec_up)
            self.interval = item.reply.pace.interval
        if item.reply.status == "rejected":
            self._rejected(item)
        else:
            turn = self._turns[item.fragment]
            turn.acknowledged, turn.refused = item.sequence, 0
            turn.lateness.arrived()
            self.leases.accepted(item.ranges)

    def _rejected(self, item: Answered) -> None:
        reply, turn = item.reply, self._turns[item.fragment]
        _log.warning("a push was rejected (%s): %s", reply.reason, reply.detail)
        self.machine.rejected(item.fragment, item.sequence)
        if reply.reason == "stale":
            self._is_late(turn, reply.hub_version)
        turn.refused = 0 if reply.reason in PASSING else turn.refused + 1
        if turn.refused >= REFUSED_LIMIT:
            raise RunFailedError(
                f"the hub refuses this node's pushes ({reply.reason})",
                cause=reply.detail,
                next="look at the run's events; the other nodes go on",
            )

    def _is_late(self, turn: Turn, hub_version: int) -> None:
        try:
            turn.lateness.stale(hub_version)
        except CannotCatchUpError as error:
            self._set_aside = error.cause
            raise

    def _merge(self, entry: Entry) -> None:
        """Apply an entry to its gathered fragment; evaluate its base when it is this node's turn."""
        self._entrance.apply(self.machine, entry)
        header = entry.header
        self.samples_committed = max(self.samples_committed, header.samples_committed)
        every = self.info.job.train.evaluate_every
        if every and header.fragment == 0 and header.version % every == 0:
            names = [c.node for c in header.contributors]
            if names[header.version // every % len(names)] == self.info.node_id:
                self._evaluate(header.version, final=False)

    def _push(self, fragment: int) -> bool:
        """Send the progress since the last push. True when the model changed (non-finite progress was given up)."""
        turn = self._turns[fragment]
        vector = self._vector(fragment)
        self.machine.accessed(fragment, self.state.accesses(fragment))
        turn.rule.observe_round(time.perf_counter() - turn.worked_since_s)
        try:
            push = self.machine.push(fragment, vector, self.state.counters() if fragment == 0 else ())
        except NonFiniteError as error:
            self._give_up(turn, error)
            return True
        turn.not_finite = 0
        turn.pushed_at_s = turn.worked_since_s = time.perf_counter()
        turn.next_step = self.meter.steps + self.interval
        self.meter.pushes += 1
        self.courier.send(push)
        return False

    def _vector(self, fragment: int) -> Any:
        """What a push is made of: the parameters as they are now."""
        return self.state.gather(fragment)

    def _give_up(self, turn: Turn, error: NonFiniteError) -> None:
        """Progress since the last push is lost in every fragment: its steps were taken together."""
        turn.not_finite += 1
        _log.warning("%s; training goes on from version %d", error, self.machine.replicas[0].version)
        if turn.not_finite >= NON_FINITE_LIMIT:
            raise error
        for fragment in range(len(self.machine.replicas)):
            self.leases.put_back(self.machine.discard(fragment, self.state.theta_of(fragment)))
        self.state.scatter()
        self.moments_are_void = True

    def _wait_for_entry(self, fragment: int) -> bool:
        """Wait for the entry of the push just made, while that is cheaper than going on without it."""
        turn, began = self._turns[fragment], time.perf_counter()
        until = began + turn.rule.budget_s()
        changed = False
        while self.machine.replicas[fragment].in_flight is not None and not self.draining:
            left = until - time.perf_counter()
            if left <= 0:
                break
            changed = self._process_arrivals(min(left, 0.5)) or changed
        waited_s = time.perf_counter() - began
        for other in self._turns:
            other.worked_since_s += waited_s
        self.meter.stalled(waited_s)
        return changed

    # ---- waiting for samples, draining, the end

    def wait_step(self, timeout_s: float = 0.1) -> tuple[str, bool]:
        """One turn of waiting between batches: (`work`, `again` or `end`, whether the model changed)."""
        fresh = not self.meter.steps and self.machine.replicas[0].version == 0
        if fresh and self._initialized and self._initial_loss is None:
            self._initialized = False
            self._evaluate(0, final=False)  # on_evaluate came after prepare
        if self.draining:
            self.leases.drain()
            changed = self._process_arrivals(timeout_s if self._in_flight() else 0.0)
            return self._drained_step(changed)
        if self.leases.has_samples and not self.leases.is_complete:
            return "work", False
        changed = self._process_arrivals()
        if self.leases.is_complete:
            return self._complete_step(changed, timeout_s)
        if not self.leases.may_come:
            changed = self._push_all() or changed
        self.leases.unpushed = self._has_progress()
        self.leases.behind = [f for f, r in enumerate(self.machine.replicas) if f and r.progress.tokens]
        self.leases.wait(timeout_s)
        return "again", changed

    def _has_progress(self) -> bool:
        return any(r.in_flight is not None or r.progress.tokens for r in self.machine.replicas)

    def _in_flight(self) -> bool:
        return any(r.in_flight is not None for r in self.machine.replicas)

    def _push_all(self) -> bool:
        """Push what can be; fragment 0, which reports the samples, after the others. True when the model changed."""
        changed = False
        for fragment in reversed(range(len(self._turns))):
            if self.machine.can_push(fragment, 1):
                changed = self._push(fragment) or changed
        return changed

    def _drained_step(self, changed: bool) -> tuple[str, bool]:
        if self.leases.is_complete:
            return "end", changed
        self._drain_since_s = self._drain_since_s or time.perf_counter()
        is_late = time.perf_counter() - self._drain_since_s > DRAIN_S
        if not is_late:
            changed = self._push_all() or changed
        pairs = list(zip(self.machine.replicas, self._turns, strict=True))
        flights = [(r.in_flight.sequence, turn.acknowledged) for r, turn in pairs if r.in_flight is not None]
        if not flights:
            return ("again" if self._has_progress() and not is_late else "end"), changed
        are_stored = all(sequence <= stored for sequence, stored in flights)  # durable: they merge without us
        nothing_left = not any(r.progress.tokens for r in self.machine.replicas)
        return ("end" if are_stored and (nothing_left or is_late) else "again"), changed

    def _complete_step(self, changed: bool, timeout_s: float) -> tuple[str, bool]:
        final = self.leases.final_versions or []
        if any(r.version < version for r, version in zip(self.machine.replicas, final, strict=True)):
            return "again", self._process_arrivals(timeout_s) or changed
        for fragment, replica in enumerate(self.machine.replicas):
            self.state.theta_of(fragment)[:] = replica.base_vector
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
        if self._set_aside:
            reason, detail = "behind", self._set_aside
        client = self.approach.connect("control")
        try:
            self.telling.last_words(client, final=reason == "finished")
            incarnation = self.machine.place.incarnation
            self.telling.send(client, "detach", m.DetachRequest(incarnation=incarnation, reason=reason, detail=detail))
        finally:
            client.close()
            self.courier.close()

    def _evaluate(self, version: int, *, final: bool) -> None:
        """Held-out loss of the base at this version of fragment 0."""
        if self.evaluate is None:
            return
        with self.meter.communicating(), self.meter.evaluating(), self.state.holding(self._base()):
            result = self.evaluate()
        self.telling.evaluated(version, result, final=final)

    def _base(self) -> Any:
        """The base of all fragments [element_count]."""
        bases = [replica.base_vector for replica in self.machine.replicas]
        if len(bases) == 1:
            return bases[0]
        return np.concatenate(bases) if isinstance(bases[0], np.ndarray) else torch.cat(bases)

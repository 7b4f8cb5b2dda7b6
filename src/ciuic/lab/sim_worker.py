"""A simulated worker: leases, steps, pushes, entries; what `train/` does, in virtual time and without a model."""

from typing import TYPE_CHECKING, Any, Literal

from ciuic.errors import CiuicError, ConflictError, SupersededError
from ciuic.lab.sim_model import Extra, Witness
from ciuic.lab.sim_time import SMALL_BYTES, Call, Process
from ciuic.ledger.intervals import Range
from ciuic.net.messages import AttachReply, LeaseReply, LeaseRequest, PushReply, ReportRequest

if TYPE_CHECKING:
    from ciuic.lab.sim_node import Agent

BATCH = 4
"""Samples per step."""
TOKENS = 128
"""Per sample."""
PUSH_BYTES, SNAPSHOT_BYTES = 640_000, 20_000_000
"""On the line: those of 5 million parameters at 1 bit and at 32."""
BOOT_S = 3.0
"""Until a worker that was started asks for its place."""
REPORT_EVERY_S = 1.0
AGAIN_S = 1.0
LEASE_AGAIN_S = 0.5


class SimWorker(Process):
    """One worker process of an agent."""

    def __init__(self, agent: "Agent", key: tuple[str, int]) -> None:
        super().__init__(agent.timeline, agent.line, agent.hub)
        self.stopped_until_s = agent.stopped_until_s
        self.agent, self.key, self.desk = agent, key, agent.desk
        self.node_id, self.run_id = agent.node.node_id, key[0]
        self.model: Extra | Witness | None = None
        self.incarnation = 0
        self.is_leaving: Literal["", "finished", "stopped", "drained"] = ""
        self._todo: list[Range] = []
        self._left = 0
        """Samples in it."""
        self._request_id = 0
        self._interval = 8
        self._steps = self._all_steps = 0
        self._is_training = self._is_leasing = self._is_pushing = self._is_gone = False
        self._final_version = -1
        self._reported_s = 0.0

    def _call(self, ask: Any, then: Any, *, up_bytes: int = SMALL_BYTES, down_bytes: int = SMALL_BYTES) -> None:
        Call(self, ask, then, up_bytes=up_bytes, down_bytes=down_bytes).send()

    # ---- a place in the run

    def start(self) -> None:
        """Load the program, then ask."""
        self.later(BOOT_S * (0.5 + self.line.chance.random()), self._attach)

    def _attach(self) -> None:
        if not self._is_gone:
            self._call(lambda _: self.desk.attach(self.run_id, self.node_id), self._attached)

    def _attached(self, reply: AttachReply | CiuicError) -> None:
        if isinstance(reply, CiuicError) or reply.state == "wait":
            self.later(AGAIN_S, self._attach)
        elif reply.state == "initialize":
            put = lambda _: self.desk.put_snapshot(self.run_id, self.node_id)  # noqa: E731
            self._call(put, lambda _: self._attach(), up_bytes=SNAPSHOT_BYTES)
        else:
            self.incarnation = reply.incarnation
            version = reply.fragments[0].snapshot_version
            get = lambda _: self.desk.snapshot(self.run_id, version)  # noqa: E731
            self._call(get, lambda answer: self._loaded(reply, answer), down_bytes=SNAPSHOT_BYTES)

    def _loaded(self, reply: AttachReply, snapshot: Any) -> None:
        if isinstance(snapshot, CiuicError):  # replaced by a newer one meanwhile
            self._attach()
            return
        version, base = snapshot
        if self.agent.node.is_witness:
            self.model = Witness(self.desk.common, self.node_id, self.incarnation, version, base)
        else:
            self.model = Extra(self.desk.common, self.node_id, self.incarnation, version)
        self._use(reply.pace)
        self._pull()
        self._lease()

    def _use(self, pace: Any) -> None:
        if pace is not None and self.model is not None:
            self.model.codec, self._interval = pace.codec_up, pace.interval

    # ---- samples and steps

    def _lease(self) -> None:
        if self._is_leasing or self.is_leaving or self.model is None:
            return
        self._is_leasing = True
        self._request_id += 1
        request = LeaseRequest(
            incarnation=self.incarnation,
            count=2 * self._interval * BATCH,
            request_id=self._request_id,
            step=BATCH,
            unpushed=self.model.tokens > 0 or self.model.has_flight,
        )
        self._call(lambda _: self.desk.ledger(self.run_id).lease(self.node_id, request), self._leased)

    def _leased(self, reply: LeaseReply | CiuicError) -> None:
        self._is_leasing = False
        if isinstance(reply, CiuicError):
            self._refused(reply)
        elif reply.status == "granted":
            self._todo += reply.ranges
            self._left += sum([b - a for a, b in reply.ranges])
            self._train()
        elif reply.status == "wait":
            if not self._is_training:
                self._push()
            self.later(LEASE_AGAIN_S, self._train)
        else:
            self._final_version = reply.final_versions[0]
            self._end_if_complete()

    def _train(self) -> None:
        if self._is_training or self.is_leaving or self.model is None:
            return
        if not self._todo:
            self._lease()
            return
        ranges, samples = self._take(max(1, self._interval - self._steps))
        self._is_training = True
        steps = -(-samples // BATCH)
        seconds = steps * self.agent.node.step_s * (0.97 + 0.06 * self.line.chance.random())
        self.later(seconds, self._trained, ranges, samples)

    def _take(self, steps: int) -> tuple[list[Range], int]:
        """Ranges for up to so many steps, and how many samples are in them."""
        before = wanted = steps * BATCH
        taken: list[Range] = []
        while wanted > 0 and self._todo:
            start, stop = self._todo.pop(0)
            cut = min(stop, start + wanted)
            taken.append((start, cut))
            wanted -= cut - start
            if cut < stop:
                self._todo.insert(0, (cut, stop))
        self._left -= before - wanted
        return taken, before - wanted

    def _trained(self, ranges: list[Range], samples: int) -> None:
        self._is_training = False
        if self.model is None:
            return
        self.model.stepped(TOKENS * samples, ranges)
        steps = -(-samples // BATCH)
        self._steps += steps
        self._all_steps += steps
        if self.is_leaving:
            self._finish_leaving()
            return
        if self._steps >= self._interval or not self._todo:
            self._push()
        self._report()
        if self._left < self._interval * BATCH:
            self._lease()
        self._train()

    def _report(self) -> None:
        now_s = self.timeline.now_s
        if now_s - self._reported_s < REPORT_EVERY_S or self.model is None:
            return
        self._reported_s = now_s
        report = ReportRequest(
            incarnation=self.incarnation,
            step=self._all_steps,
            samples=self._all_steps * BATCH,
            tokens=self._all_steps * BATCH * TOKENS,
            base_versions=[self.model.version],
            step_s=self.agent.node.step_s,
        )
        self._call(lambda _: self.desk.ledger(self.run_id).report(self.node_id, report), lambda _: None)

    # ---- pushes and entries

    def _push(self) -> None:
        model = self.model
        if model is None or model.has_flight or self._is_pushing or not model.tokens:
            return
        frame = model.push()
        sequence, self._steps, self._is_pushing = model.sequence, 0, True
        ask = lambda _: self.desk.ledger(self.run_id).push(self.node_id, frame)  # noqa: E731
        self._call(ask, lambda reply: self._pushed(sequence, reply), up_bytes=PUSH_BYTES)

    def _pushed(self, sequence: int, reply: PushReply | CiuicError) -> None:
        self._is_pushing = False
        if isinstance(reply, CiuicError):
            self._refused(reply)
            return
        if reply.status == "rejected" and self.model is not None:
            self.model.rejected(sequence)
        self._use(reply.pace)
        if self.is_leaving:
            self._finish_leaving()

    def _pull(self) -> None:
        model = self.model
        if model is None or self._is_gone:
            return
        after = model.version
        self._call(lambda call: self.desk.entries(call, self.run_id, self.node_id, after), self._pulled)

    def _pulled(self, version: int | CiuicError) -> None:
        if self.model is None or self._is_gone:
            return
        if isinstance(version, CiuicError):
            self.later(AGAIN_S, self._pull)
            return
        self.model.merge_up_to(version)
        if self._steps >= self._interval and not self.is_leaving:
            self._push()
        self._end_if_complete()
        self._pull()

    # ---- ends

    def _refused(self, error: CiuicError) -> None:
        """Another incarnation speaks for this node, or the run does not count on it any more."""
        if isinstance(error, SupersededError):
            self.agent.worker_ended(self, "stopped")
        elif isinstance(error, ConflictError) and not self.is_leaving:
            self.later(AGAIN_S, self._train)

    def _end_if_complete(self) -> None:
        model = self.model
        if model is not None and 0 <= self._final_version <= model.version and not self.is_leaving:
            self.desk.finals[self.node_id, self.incarnation] = (model.version, model.digest)
            self.is_leaving = "finished"
            self._detach()

    def leave(self, reason: Literal["stopped", "drained"]) -> None:
        """End after the present step: push what is trained, give the rest back."""
        self.is_leaving = reason
        if not self._is_training:
            self._finish_leaving()

    def _finish_leaving(self) -> None:
        model = self.model
        if model is None:
            self._is_gone = True
            self.agent.worker_ended(self, "stopped")
        elif not self._is_pushing and model.tokens and not model.has_flight:
            self._push()  # comes back here with the answer
        elif not self._is_pushing:
            self._detach()

    def _detach(self) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        reason = self.is_leaving or "stopped"
        state = "finished" if reason == "finished" else "stopped"
        ask = lambda _: self.desk.detach(self.run_id, self.node_id, self.incarnation, reason)  # noqa: E731
        self._call(ask, lambda _: self.agent.worker_ended(self, state))

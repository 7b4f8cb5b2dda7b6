"""What stands between simulated nodes and the hub: the endpoints, with heartbeats and entries held as long polls."""

import time
from typing import Any

import msgspec
import numpy as np

from ciuic.errors import CiuicError
from ciuic.hub.membership.state import Desired
from ciuic.hub.run.rounds import RunLedger
from ciuic.lab.sim_hub import SimHub
from ciuic.lab.sim_model import Common
from ciuic.lab.sim_time import HELD, SMALL_BYTES, Call, Timeline
from ciuic.lab.sim_worker import PUSH_BYTES
from ciuic.ledger.entry import snapshot_from_frame
from ciuic.net.messages import AttachReply, AttachRequest, DetachRequest, HeartbeatRequest

ENTRIES_BYTES = 16 << 20
ENTRIES_WAIT_S = 60.0


class Desk:
    """The hub's endpoints."""

    def __init__(self, timeline: Timeline, hub: SimHub, common: Common) -> None:
        self.timeline, self.hub, self.common = timeline, hub, common
        self.finals: dict[tuple[str, int], tuple[int, str]] = {}
        """(node, incarnation) -> (version, digest) of workers that trained to the end."""
        self._beats: dict[str, tuple[Call, str]] = {}
        self._polls: dict[str, tuple[Call, str, int]] = {}
        self.first_entry_s = self.last_entry_s = 0.0
        """Processor time of this process when entries were made."""
        self._told = 0
        """Version whose entries nobody waits for any more."""
        self._layout = msgspec.to_builtins(common.layout)
        hub.on_wake = self._answer_beat
        hub.on_run = self._answer_polls

    def hub_died(self) -> None:
        """Connections break: whoever waited tries again."""
        waiting = [call for call, *_ in (*self._beats.values(), *self._polls.values())]
        self._beats, self._polls = {}, {}
        for call in waiting:
            call.again()

    # ---- agents

    def beat(self, call: Call, node_id: str, request: HeartbeatRequest) -> Any:
        """The desired state when it is news, else held for a while. Raises CertificateError, SupersededError."""
        self.hub.change(lambda now, out: self.hub.state.beat(now, node_id, request, out))
        if self.hub.state.nodes[node_id].revision != request.known_revision:
            return self.hub.state.desired(node_id, request.agent_incarnation)
        self._answer_beat(node_id)  # one that was held before: a late copy must not take the place of a newer one
        self._beats[node_id] = (call, request.agent_incarnation)
        self.timeline.after(request.wait_s, self._beat_is_due, node_id, call)
        return HELD

    def _beat_is_due(self, node_id: str, call: Call) -> None:
        held = self._beats.get(node_id)
        if held is not None and held[0] is call:
            self._answer_beat(node_id)

    def _answer_beat(self, node_id: str) -> None:
        held = self._beats.pop(node_id, None)
        if held is not None:
            call, incarnation = held
            call.answer(self._desired(node_id, incarnation))

    def _desired(self, node_id: str, incarnation: str) -> Desired | CiuicError:
        try:
            return self.hub.state.desired(node_id, incarnation)
        except CiuicError as error:
            return error

    def leave(self, node_id: str, incarnation: str) -> None:
        """Raises CertificateError, SupersededError."""
        self.hub.change(lambda now, out: self.hub.state.leave(now, node_id, incarnation, out))

    # ---- workers

    def ledger(self, run_id: str) -> RunLedger:
        """Raises NotFoundError, ConflictError."""
        return self.hub.ledger(run_id)

    def attach(self, run_id: str, node_id: str) -> AttachReply:
        """Raises ConflictError and what a ledger raises."""
        self.hub.check_assigned(run_id, node_id)
        return self.ledger(run_id).attach(node_id, AttachRequest(layout=self._layout))

    def put_snapshot(self, run_id: str, node_id: str) -> None:
        """Version 0."""
        self.ledger(run_id).put_snapshot(node_id, 0, self.common.version_0())

    def snapshot(self, run_id: str, version: int) -> tuple[int, Any]:
        """(version, base [elements])."""
        frame = self.ledger(run_id).snapshot_path(0, version).read_bytes()
        return version, np.array(snapshot_from_frame(frame, self.common.element_count).vectors["base"])

    def entries(self, call: Call, run_id: str, node_id: str, after: int) -> Any:
        """The version that the entries after `after` lead to; held while there are none."""
        frames = self.ledger(run_id).entries_after(0, after, ENTRIES_BYTES)
        if frames:
            self.common.take(after, frames)
            call.answer(after + len(frames), len(frames) * PUSH_BYTES)
        else:
            self._poll_is_due(node_id, None)
            self._polls[node_id] = (call, run_id, after)
            self.timeline.after(ENTRIES_WAIT_S, self._poll_is_due, node_id, call)
        return HELD

    def _poll_is_due(self, node_id: str, call: Call | None) -> None:
        """Answer what is held for the node: this call, or (None) any."""
        held = self._polls.get(node_id)
        if held is not None and (call is None or held[0] is call):
            del self._polls[node_id]
            held[0].answer(held[2], SMALL_BYTES)

    def _answer_polls(self, run_id: str) -> None:
        """Something happened in the run: entries that somebody waits for?"""
        ledger = self.hub.ledgers.get(run_id)
        if ledger is None or not ledger.fragments:
            return
        version = ledger.fragments[0].version
        if version == self._told:
            return
        self._told = version
        self.last_entry_s = time.process_time()
        self.first_entry_s = self.first_entry_s or self.last_entry_s
        if version > len(self.common.entries):
            known = len(self.common.entries)
            self.common.take(known, ledger.entries_after(0, known, ENTRIES_BYTES))
        due = [node_id for node_id, (_, run, after) in self._polls.items() if run == run_id and after < version]
        for node_id in due:
            call, _, after = self._polls.pop(node_id)
            try:
                self.entries(call, run_id, node_id, after)
            except CiuicError as error:
                call.answer(error)

    def detach(self, run_id: str, node_id: str, incarnation: int, reason: Any) -> None:
        """Raises SupersededError."""
        self.ledger(run_id).detach(node_id, DetachRequest(incarnation=incarnation, reason=reason))

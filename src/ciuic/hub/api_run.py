"""Endpoints for workers: attach, lease, push, entries, snapshots, reports. All of it is the run's ledger's work."""

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from ciuic.errors import ConflictError
from ciuic.hub.auth import NODES
from ciuic.hub.endpoints import MIB, Call, Desk, reply
from ciuic.hub.events import ANYTHING, run_topic
from ciuic.hub.runs import Ledger
from ciuic.net.messages import (
    AttachReply,
    AttachRequest,
    DetachRequest,
    EvaluationRequest,
    LeaseRequest,
    Ok,
    ReportRequest,
    decode,
)

T = TypeVar("T")

ATTACH_LIMIT_BYTES = 64 * MIB
"""A layout names every parameter of the model."""
ENTRIES_BYTES = 16 * MIB
LONGEST_WAIT_S = 60.0
BYTES_PER_ELEMENT = 5
"""Full precision is 4; the rest is scales. Headers and counters: the overhead."""
FRAME_OVERHEAD_BYTES = 4 * MIB


class SnapshotResponse(FileResponse):
    """A file, or the part of it that Range asks for, in pieces that keep TLS busy."""

    chunk_size = 512 * 1024


class RunApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._hub = desk.hub

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        route, run = self._desk.route, "/v1/runs/{run}"
        return [
            route("POST", f"{run}/attach", self.attach, roles=NODES, limit_bytes=0),
            route("POST", f"{run}/detach", self.detach, roles=NODES),
            route("POST", f"{run}/lease", self.lease, roles=NODES),
            route("POST", f"{run}/report", self.report, roles=NODES),
            route("POST", f"{run}/evaluation", self.evaluation, roles=NODES),
            route("POST", f"{run}/push", self.push, roles=NODES, limit_bytes=0),
            route("GET", f"{run}/entries", self.entries, roles=NODES),
            route("PUT", f"{run}/snapshot", self.put_snapshot, roles=NODES, limit_bytes=0),
            route("GET", f"{run}/snapshot", self.get_snapshot, roles=NODES),
        ]

    async def attach(self, call: Call) -> Response:
        """Only nodes that the hub has assigned to the run may take a place in it."""
        await self._check_assigned(call)
        request = decode(await call.read(ATTACH_LIMIT_BYTES), AttachRequest)
        answer = await self._ledger(call, lambda ledger: ledger.attach(call.name, request))
        return reply(self._with_boot(answer))

    async def _check_assigned(self, call: Call) -> None:
        """Before a body is read. Raises ConflictError."""
        run_id, node_id = call.path("run"), call.name
        if node_id not in await self._desk.short(self._hub.members, run_id):
            run = await self._desk.short(self._hub.run, run_id)
            raise ConflictError(
                f"{node_id} is not assigned to {run_id}",
                cause=f"the run is {run.state}" if run.state != "running" else "the hub has taken it out of the run",
                next="stop this worker; the agent starts a new one when the hub assigns the run again",
            )

    def _with_boot(self, answer: AttachReply) -> AttachReply:
        return answer if answer.boot_id else msgspec.structs.replace(answer, boot_id=self._hub.boot_id)

    async def detach(self, call: Call) -> Response:
        request = decode(call.body, DetachRequest)
        await self._ledger(call, lambda ledger: ledger.detach(call.name, request))
        return reply(Ok())

    async def lease(self, call: Call) -> Response:
        request = decode(call.body, LeaseRequest)
        return reply(await self._ledger(call, lambda ledger: ledger.lease(call.name, request)))

    async def report(self, call: Call) -> Response:
        request = decode(call.body, ReportRequest)
        await self._ledger(call, lambda ledger: ledger.report(call.name, request))
        self._hub.board.notify(ANYTHING)
        return reply(Ok())

    async def evaluation(self, call: Call) -> Response:
        request = decode(call.body, EvaluationRequest)
        await self._ledger(call, lambda ledger: ledger.evaluation(call.name, request))
        return reply(Ok())

    async def push(self, call: Call) -> Response:
        if not await self._ledger(call, lambda ledger: ledger.knows(call.name)):
            raise ConflictError(f"{call.name} has no place in {call.path('run')}", next="attach first")
        frame = await call.read(await self._frame_limit(call))
        return reply(await self._ledger(call, lambda ledger: ledger.push(call.name, frame)))

    async def put_snapshot(self, call: Call) -> Response:
        fragment = call.number("fragment")
        if call.number("version") != 0:
            raise ConflictError("only version 0 is uploaded", cause="all later versions come from entries")
        await self._check_assigned(call)
        frame = await call.read(await self._frame_limit(call))
        await self._ledger(call, lambda ledger: ledger.put_snapshot(call.name, fragment, frame))
        return reply(Ok())

    async def get_snapshot(self, call: Call) -> Response:
        fragment, version = call.number("fragment"), call.number("version")
        path = await self._ledger(call, lambda ledger: ledger.snapshot_path(fragment, version))
        return SnapshotResponse(path, media_type="application/octet-stream")

    async def entries(self, call: Call) -> Response:
        """The entries after a version, one after the other; held for up to wait_s while there are none."""
        fragment, after = call.number("fragment"), call.number("after")
        until_s = time.monotonic() + call.seconds("wait_s", 0.0, largest=LONGEST_WAIT_S)
        board, topic = self._hub.board, run_topic(call.path("run"))
        while True:
            seen = board.seen(topic)
            frames = await self._ledger(call, lambda ledger: ledger.entries_after(fragment, after, ENTRIES_BYTES))
            if frames:
                return Response(b"".join(frames), media_type="application/octet-stream")
            left_s = until_s - time.monotonic()
            if left_s <= 0 or board.is_closed:
                return Response(status_code=204)
            await board.wait(topic, seen, left_s)

    async def _frame_limit(self, call: Call) -> int:
        """How large a frame of this run's model can be. Raises ConflictError while the model is not known."""
        layout = await self._ledger(call, lambda ledger: ledger.layout)
        if layout is None:
            raise ConflictError(
                "the run does not know its model yet", cause="no worker has attached", next="attach first"
            )
        return FRAME_OVERHEAD_BYTES + BYTES_PER_ELEMENT * sum(tensor.element_count for tensor in layout.tensors)

    async def _ledger(self, call: Call, work: Callable[[Ledger], T]) -> T:
        run_id = call.path("run")
        return await self._desk.long(lambda: work(self._hub.ledger(run_id)))

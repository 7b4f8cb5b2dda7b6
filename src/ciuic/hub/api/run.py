"""Endpoints for workers: attach, lease, push, entries, snapshots, reports. All of it is the run's ledger's work."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from ciuic.errors import ConflictError, MovedError
from ciuic.hub.access.auth import NODES
from ciuic.hub.api.chunks import ChunkApi
from ciuic.hub.api.endpoints import MIB, Call, Desk, reply
from ciuic.hub.api.events import ANYTHING, Board, run_topic
from ciuic.hub.api.spool import Spool
from ciuic.hub.run.courtesy import ChunkLists, Courtesy, SnapshotResponse
from ciuic.hub.run.shelf import Ledger, Sharded
from ciuic.hub.run.sources import Sources
from ciuic.ledger.files import Spooled
from ciuic.net.chunks import Manifest
from ciuic.net.messages import (
    AttachReply,
    AttachRequest,
    BasesReply,
    DetachRequest,
    EvaluationRequest,
    FragmentState,
    LeaseRequest,
    Ok,
    PushReply,
    ReportRequest,
    SourcesReport,
    decode,
)

T = TypeVar("T")

ATTACH_LIMIT_BYTES = 64 * MIB
"""A layout names every parameter of the model."""
ENTRIES_BYTES = 16 * MIB
MOST_ENTRIES = 1 << 20
LONGEST_WAIT_S = 60.0
BYTES_PER_ELEMENT = 5
"""Full precision is 4; the rest is scales. Headers and counters: the overhead."""
FRAME_OVERHEAD_BYTES = 4 * MIB


class RunApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._hub = desk.hub
        self._chunks = ChunkApi(desk, Spool(desk.hub.config.folder / "spool"), self)
        self._courtesy, self._lists = Courtesy(), ChunkLists()
        self._sources = Sources(desk.hub.peers, desk.hub.is_here)

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        route, run = self._desk.route, "/v1/runs/{run}"
        return [
            route("POST", f"{run}/attach", self.attach, roles=NODES, limit_bytes=0),
            route("GET", f"{run}/bases", self.bases, roles=NODES),
            route("POST", f"{run}/detach", self.detach, roles=NODES),
            route("POST", f"{run}/sources", self.sources, roles=NODES),
            route("POST", f"{run}/lease", self.lease, roles=NODES),
            route("POST", f"{run}/report", self.report, roles=NODES),
            route("POST", f"{run}/evaluation", self.evaluation, roles=NODES),
            route("POST", f"{run}/push", self.push, roles=NODES, limit_bytes=0),
            route("GET", f"{run}/entries", self.entries, roles=NODES),
            route("PUT", f"{run}/snapshot", self.put_snapshot, roles=NODES, limit_bytes=0),
            route("GET", f"{run}/snapshot", self.get_snapshot, roles=NODES),
            route("GET", f"{run}/snapshot/chunks", self.list_chunks, roles=NODES),
            *self._chunks.routes(),
        ]

    async def attach(self, call: Call) -> Response:
        """Only nodes that the hub has assigned to the run may take a place in it."""
        await self._check_assigned(call)
        request = decode(await call.read(ATTACH_LIMIT_BYTES), AttachRequest)
        answer = await self._ledger(
            call, lambda ledger: self._sources.fill(ledger.attach(call.name, request), ledger, call.name)
        )
        if answer.state == "ready":
            listed = await self._ledger(call, lambda ledger: self._listed(answer.fragments, ledger))
            answer = msgspec.structs.replace(answer, fragments=listed)
        return reply(self._with_boot(answer))

    async def bases(self, call: Call) -> Response:
        """What an attachment will say of the run's bases, so that a joiner may begin to fetch them."""
        await self._check_assigned(call)

        def look(ledger: Ledger) -> list[FragmentState]:
            return self._listed(self._sources.filled(ledger.bases(), ledger, call.name), ledger)

        return reply(BasesReply(fragments=await self._ledger(call, look)))

    def _listed(self, states: list[FragmentState], ledger: Ledger) -> list[FragmentState]:
        """With the chunks of the snapshots here, so that a joiner need not ask for them."""
        return [
            self._lists.into(state, partial(ledger.snapshot_path, number, state.snapshot_version))
            for number, state in enumerate(states)
        ]

    async def sources(self, call: Call) -> Response:
        """What a joiner says about the nodes it took its snapshot from."""
        await self._check_place(call)
        report, run_id = decode(call.body, SourcesReport), call.path("run")
        for line in self._sources.report(run_id, call.name, report):
            await self._desk.short(self._hub.say, line)
        return reply(Ok())

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
        await self._check_place(call)
        frame = await call.read(await self._frame_limit(call))
        return reply(await self._ledger(call, lambda ledger: ledger.push(call.name, frame)))

    async def _check_place(self, call: Call) -> None:
        """Before a push is read. Raises ConflictError."""
        if not await self._ledger(call, lambda ledger: ledger.knows(call.name)):
            raise ConflictError(f"{call.name} has no place in {call.path('run')}", next="attach first")

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
        return SnapshotResponse(path, self._courtesy)

    async def list_chunks(self, call: Call) -> Response:
        """What a snapshot consists of, so that it can be fetched in parts and from others."""
        fragment, version = call.number("fragment"), call.number("version")
        path = await self._ledger(call, lambda ledger: ledger.snapshot_path(fragment, version))
        return reply(await self._desk.long(self._lists.of, path))

    async def entries(self, call: Call) -> Response:
        """The entries after a version, one after the other; held for up to wait_s while there are none."""
        fragment, after = call.number("fragment"), call.number("after")

        async def fetch() -> list[bytes]:
            return await self._ledger(call, lambda ledger: ledger.entries_after(fragment, after, ENTRIES_BYTES))

        return await hold(call, self._hub.board, self._courtesy, fetch)

    # ---- large bodies, in chunks

    async def most_bytes(self, call: Call) -> int:
        """As Taker wants it."""
        if not await self._ledger(call, lambda ledger: ledger.knows(call.name)):
            await self._check_assigned(call)
        return await self._frame_limit(call)

    async def expect(self, call: Call, manifest: Manifest) -> None:
        """As Taker wants it: a push of a node with a place, or version 0; of a fragment that is served here."""
        await (self._check_place(call) if manifest.what == "push" else self._check_assigned(call))
        url = await self._ledger(call, lambda ledger: _place_of(ledger, manifest.fragment))
        if url:
            raise MovedError(f"fragment {manifest.fragment} is served at {url}", next="ask the hub where")

    async def take(self, call: Call, manifest: Manifest, frame: bytes, spooled: Spooled) -> PushReply | None:
        """As Taker wants it."""
        if manifest.what == "push":
            return await self._ledger(call, lambda ledger: ledger.push(call.name, frame, spooled))
        await self._ledger(call, lambda ledger: ledger.put_snapshot(call.name, manifest.fragment, frame))
        return None

    # ---- helpers

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


def _place_of(ledger: Ledger, fragment: int) -> str:
    """Where a shard serves the fragment; empty: here, or nowhere (the push itself is refused then)."""
    places = ledger.places() if isinstance(ledger, Sharded) else []
    return places[fragment] if fragment < len(places) else ""


async def hold(call: Call, board: Board, courtesy: Courtesy, fetch: Callable[[], Awaitable[list[bytes]]]) -> Response:
    """The entries that `fetch` gives; while there are none the call is held for up to its wait_s, then 204."""
    until_s = time.monotonic() + call.seconds("wait_s", 0.0, largest=LONGEST_WAIT_S)
    most = call.number("most", MOST_ENTRIES)
    is_joiner = call.number("joining", 0) > 0  # it waits for its snapshot as well, and nobody for it
    topic = run_topic(call.path("run"))
    while True:
        seen = board.seen(topic)
        if frames := (await fetch())[:most]:
            if not is_joiner:
                courtesy.urgent(call.request.scope)
            return Response(b"".join(frames), media_type="application/octet-stream")
        left_s = until_s - time.monotonic()
        if left_s <= 0 or board.is_closed:
            return Response(status_code=204)
        await board.wait(topic, seen, left_s)

"""Endpoints for people and their tools: nodes, runs, logs, events, the live page's state, metrics.

The seam for the page: `StateSource.current_state` gives the JSON of /api/state, `StateSource.changes` yields it again,
at most once a second, whenever something has changed.
"""

import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ciuic.hub.auth import VIEWERS
from ciuic.hub.endpoints import Call, Desk, reply
from ciuic.hub.events import ALIVE_S, ANYTHING, EVENTS, Numbered, follow, logs_topic
from ciuic.hub.metrics import metrics_text
from ciuic.net.messages import Event, HubInfo, RunInfo

RUNS_SHOWN = 100
RUNS_IN_FULL = 2
EVENTS_IN_STATE = 60
STREAM_PERIOD_S = 1.0
NDJSON = "application/x-ndjson"
_NO_STORE = {"cache-control": "no-store"}


class State(msgspec.Struct, frozen=True, kw_only=True):
    """GET /api/state and each message of GET /api/stream."""

    hub: HubInfo
    runs: list[RunInfo]
    """The latest runs in full, oldest first."""
    events: list[Event]
    """The latest events, oldest first."""


@dataclass(frozen=True, kw_only=True)
class HubFacts:
    """What the port knows of the hub."""

    url: str
    version: str


class StateSource:
    """The whole state as JSON, for the live page."""

    def __init__(self, desk: Desk, facts: HubFacts) -> None:
        self._desk = desk
        self._hub = desk.hub
        self._facts = facts

    def hub_info(self) -> HubInfo:
        """The hub with its nodes and its latest runs; synchronous."""
        hub = self._hub
        return HubInfo(
            url=self._facts.url,
            version=self._facts.version,
            boot_id=hub.boot_id,
            started_at=hub.started_at,
            nodes=hub.node_infos(),
            runs=[hub.run_info(run, full=False) for run in hub.runs(RUNS_SHOWN)],
            disk_free_bytes=shutil.disk_usage(hub.config.folder).free,
        )

    async def current_state(self) -> bytes:
        """The JSON of `State`."""
        return await self._desk.long(self._state)

    async def changes(self) -> AsyncIterator[bytes]:
        """The state now, and again when something has changed; b"" when nothing did for a while. Ends with the hub."""
        board = self._hub.board
        while True:
            seen = board.seen(ANYTHING)
            yield await self.current_state()
            await board.pause(STREAM_PERIOD_S)
            while not await board.wait(ANYTHING, seen, ALIVE_S):
                if board.is_closed:
                    return
                yield b""

    def _state(self) -> bytes:
        hub = self._hub
        runs = [hub.run_info(run, full=True) for run in hub.runs(RUNS_IN_FULL)]
        events = hub.store.latest_events(EVENTS_IN_STATE)
        return msgspec.json.encode(State(hub=self.hub_info(), runs=runs, events=events))


class ViewApi:
    """Handlers; `routes` says which is where."""

    def __init__(self, desk: Desk, source: StateSource) -> None:
        self._desk = desk
        self._hub = desk.hub
        self._source = source

    def routes(self) -> list[Route]:
        """All endpoints of this part."""
        wanted = [
            ("/v1/hub", self.hub),
            ("/v1/nodes", self.nodes),
            ("/v1/runs", self.runs),
            ("/v1/runs/{run}", self.run),
            ("/v1/runs/{run}/logs", self.logs),
            ("/v1/events", self.events),
            ("/api/state", self.state),
            ("/api/stream", self.stream),
            ("/metrics", self.metrics),
        ]
        return [self._desk.route("GET", path, handler, roles=VIEWERS) for path, handler in wanted]

    async def hub(self, call: Call) -> Response:
        return reply(await self._desk.long(self._source.hub_info))

    async def nodes(self, call: Call) -> Response:
        return reply(list(await self._desk.short(self._hub.node_infos)))

    async def runs(self, call: Call) -> Response:
        """The latest runs, without rounds and evaluations."""
        runs = await self._desk.short(self._hub.runs, call.number("latest", RUNS_SHOWN, largest=10_000))
        return reply(await self._desk.long(lambda: [self._hub.run_info(run, full=False) for run in runs]))

    async def run(self, call: Call) -> Response:
        run = await self._desk.short(self._hub.run, call.path("run"))
        return reply(await self._desk.long(self._hub.run_info, run, full=True))

    async def logs(self, call: Call) -> Response:
        """NDJSON; with follow=1 until the run has ended and all its lines are sent."""
        run_id, node_id = call.path("run"), call.text("node")
        await self._desk.short(self._hub.run, run_id)

        async def fetch(after: int) -> Sequence[Numbered]:
            return await self._desk.short(self._hub.store.lines_after, run_id, after, node_id=node_id)

        def is_over() -> bool:
            return not call.number("follow", 0) or self._hub.has_ended(run_id)

        lines = follow(fetch, call.number("after", 0), self._hub.board, logs_topic(run_id), is_over)
        return StreamingResponse(lines, media_type=NDJSON, headers=_NO_STORE)

    async def events(self, call: Call) -> Response:
        """NDJSON; with follow=1 for as long as the caller listens."""
        run_id, is_followed = call.text("run"), bool(call.number("follow", 0))

        async def fetch(after: int) -> Sequence[Numbered]:
            return await self._desk.short(self._hub.store.events_after, after, run_id=run_id)

        lines = follow(fetch, call.number("after", 0), self._hub.board, EVENTS, lambda: not is_followed)
        return StreamingResponse(lines, media_type=NDJSON, headers=_NO_STORE)

    async def state(self, call: Call) -> Response:
        return Response(await self._source.current_state(), media_type="application/json", headers=_NO_STORE)

    async def stream(self, call: Call) -> Response:
        """Server-sent events: the same as /api/state."""

        async def messages() -> AsyncIterator[bytes]:
            async for state in self._source.changes():
                yield b"data: " + state + b"\n\n" if state else b": alive\n\n"

        return StreamingResponse(messages(), media_type="text/event-stream", headers=_NO_STORE)

    async def metrics(self, call: Call) -> Response:
        text = await self._desk.long(metrics_text, self._hub, self._desk.answered)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

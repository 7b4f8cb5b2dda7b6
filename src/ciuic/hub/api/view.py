"""Endpoints for people and their tools: nodes, runs, logs, events, the live page's state, metrics.

The seam for the page: `StateSource.current_state` gives the JSON of /api/state, `StateSource.changes` yields it again,
at most once a second, whenever something has changed.
"""

import shutil
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ciuic.hub.access.auth import VIEWERS
from ciuic.hub.api.endpoints import Call, Desk, reply
from ciuic.hub.api.events import ANYTHING, EVENTS, Numbered, follow, logs_topic
from ciuic.hub.api.metrics import metrics_text
from ciuic.hub.api.news import Cost, News, State
from ciuic.hub.keeping.retention import DiskMeter
from ciuic.hub.keeping.store import Wanted
from ciuic.hub.membership.records import Run
from ciuic.net.messages import HubInfo, RunInfo

RUNS_SHOWN = 100
RUNS_IN_STATE = 30
RUNS_IN_FULL = 2
EVENTS_IN_STATE = 100
MOST_KINDS = 20
STREAM_PERIOD_S = 1.0
STREAM_ALIVE_S = 5.0
"""A stream that has nothing to say tells so often that it is alive."""
SETTLED_S = 60.0
"""So long after its end, what is known of a run changes no more (unless it is resumed)."""
NDJSON = "application/x-ndjson"
_NO_STORE = {"cache-control": "no-store"}


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
        self._meter = DiskMeter(desk.hub.config.folder)
        self._cost = Cost()
        self._viewers = 0
        self._settled: dict[tuple[str, bool], tuple[Run, RunInfo]] = {}

    def hub_info(self, runs: int = RUNS_SHOWN) -> HubInfo:
        """The hub with its nodes and its latest runs; synchronous."""
        hub = self._hub
        return HubInfo(
            url=self._facts.url,
            version=self._facts.version,
            boot_id=hub.boot_id,
            started_at=hub.started_at,
            nodes=hub.node_infos(),
            runs=[self._run_info(run, full=False) for run in hub.runs(runs)],
            disk_free_bytes=shutil.disk_usage(hub.config.folder).free,
            disk=self._meter.use(),
        )

    async def current_state(self) -> bytes:
        """The JSON of `State`."""
        return await self._desk.long(self._message, None)

    async def changes(self, news: News | None = None) -> AsyncIterator[bytes]:
        """The state now, and again when something has changed; b"" when nothing did for a while. Ends with the hub.

        With `news` only what is new in it.
        """
        board = self._hub.board
        self._viewers += 1
        try:
            while True:
                seen = board.seen(ANYTHING)
                yield await self._desk.long(self._message, news)
                await board.pause(STREAM_PERIOD_S)
                while not await board.wait(ANYTHING, seen, STREAM_ALIVE_S):
                    if board.is_closed:
                        return
                    yield b""
        finally:
            self._viewers -= 1

    def _message(self, news: News | None) -> bytes:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        state = self._state()
        body = msgspec.json.encode(state if news is None else news.of(state))
        self._cost = Cost(
            build_s=time.perf_counter() - began_s,
            build_cpu_s=time.thread_time() - began_cpu_s,
            message_bytes=len(body),
            messages=self._cost.messages + 1,
            viewers=self._viewers,
        )
        return body

    def _state(self) -> State:
        hub = self._hub
        return State(
            time=time.time(),
            hub=self.hub_info(RUNS_IN_STATE),
            runs=[self._run_info(run, full=True) for run in hub.runs(RUNS_IN_FULL)],
            events=hub.store.latest_events(EVENTS_IN_STATE),
            cost=self._cost,
        )

    def _run_info(self, run: Run, *, full: bool) -> RunInfo:
        """As the hub tells it. The record of a run that ended a while ago is read and decoded only once."""
        key = run.run_id, full
        kept = self._settled.get(key)
        if kept is not None and kept[0] == run:
            return kept[1]
        info = self._hub.run_info(run, full=full)
        is_settled = run.ended_at is not None and time.time() - run.ended_at > SETTLED_S
        if is_settled and self._hub.shelf.peek(run.run_id) is None:
            if len(self._settled) >= 2 * RUNS_SHOWN:
                self._settled = {}
            self._settled[key] = run, info
        return info


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
        run_id, node_id, is_followed = call.path("run"), call.text("node"), bool(call.number("follow", 0))
        await self._desk.short(self._hub.run, run_id)

        async def fetch(after: int) -> Sequence[Numbered]:
            return await self._desk.short(self._hub.store.lines_after, run_id, after, node_id=node_id)

        async def is_over() -> bool:
            return not is_followed or await self._desk.short(self._hub.has_ended, run_id)

        lines = follow(fetch, call.number("after", 0), self._hub.board, logs_topic(run_id), is_over)
        return StreamingResponse(lines, media_type=NDJSON, headers=_NO_STORE)

    async def events(self, call: Call) -> Response:
        """NDJSON; with follow=1 for as long as the caller listens. kind may come several times."""
        is_followed = bool(call.number("follow", 0))
        wanted = Wanted(
            run_id=call.text("run"),
            with_hub=bool(call.number("hub", 0)),
            kinds=tuple(call.request.query_params.getlist("kind")[:MOST_KINDS]),
            node_id=call.text("node"),
            since=float(call.number("since", 0)),
        )

        async def fetch(after: int) -> Sequence[Numbered]:
            return await self._desk.short(self._hub.store.events_after, after, wanted=wanted)

        async def is_over() -> bool:
            return not is_followed

        lines = follow(fetch, call.number("after", 0), self._hub.board, EVENTS, is_over)
        return StreamingResponse(lines, media_type=NDJSON, headers=_NO_STORE)

    async def state(self, call: Call) -> Response:
        return Response(await self._source.current_state(), media_type="application/json", headers=_NO_STORE)

    async def stream(self, call: Call) -> Response:
        """Server-sent events: the same as /api/state; with news=1 only what is new after the first message."""
        news = News() if call.number("news", 0) else None

        async def messages() -> AsyncIterator[bytes]:
            async for state in self._source.changes(news):
                yield b"data: " + state + b"\n\n" if state else b"event: alive\ndata: 1\n\n"

        return StreamingResponse(messages(), media_type="text/event-stream", headers=_NO_STORE)

    async def metrics(self, call: Call) -> Response:
        text = await self._desk.long(metrics_text, self._hub, dict(self._desk.answered))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

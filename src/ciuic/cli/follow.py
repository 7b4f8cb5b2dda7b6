"""Commands that read the hub's streams: logs and events."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar
from urllib.parse import urlencode

import typer

from ciuic.cli.output import JsonOption, print_hanging, print_line, print_note
from ciuic.cli.profile import operator_client
from ciuic.cli.runs import OptionalRun, newest_run, run_path
from ciuic.errors import UnreachableError
from ciuic.units import parse_duration_s

if TYPE_CHECKING:
    from ciuic.net.client import HubClient

RECONNECT_S = 1.0


class _Numbered(Protocol):
    @property
    def id(self) -> int: ...


T = TypeVar("T", bound=_Numbered)

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is new until ctrl-c.")]
AfterOption = Annotated[int, typer.Option(min=0, help="Only what comes after this number.")]


def logs(
    run_id: OptionalRun = "",
    node: Annotated[str, typer.Option(help="Only lines of this node.")] = "",
    rank: Annotated[int | None, typer.Option(help="Only lines of this rank.", min=0)] = None,
    after: AfterOption = 0,
    follow: FollowOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print what the workers of a run wrote, all nodes and ranks in order of time.

    With --follow in the order in which lines reach the hub. With --json one JSON object per line.
    """
    from ciuic.cli import views

    client = operator_client()
    path = f"{run_path(run_id or newest_run(client))}/logs"
    lines = _lines(client, path, {"node": node, "after": after}, views.LogRecord, follow=follow)
    for raw, line in lines if follow else sorted(lines, key=lambda pair: pair[1].time):
        if rank in (None, line.rank):
            print_line(raw if as_json else views.log_text(line))


def events(
    run: Annotated[str, typer.Option(help="Only the story of this run, with what happened to the hub meanwhile.")] = "",
    kind: Annotated[
        list[str] | None, typer.Option(help="Only this kind, like round.closed, or node for all node.* (repeatable).")
    ] = None,
    node: Annotated[str, typer.Option(help="Only what is about this node.")] = "",
    since: Annotated[str, typer.Option(help="Only what is younger, like 10 min.")] = "",
    every: Annotated[bool, typer.Option("--all", help="With --run: every round on a line of its own.")] = False,
    after: AfterOption = 0,
    follow: FollowOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the story of the network, or of one run.

    A run's story has times since its beginning, and rows of rounds folded into one line. With --json one JSON object
    per line.
    """
    from ciuic.cli import views
    from ciuic.net.messages import Event

    query: dict[str, object] = {"run": run, "node": node, "after": after, "kind": list(kind or [])}
    if since:
        query["since"] = int(max(0.0, time.time() - parse_duration_s(since)))
    if run:
        query["hub"] = 1
    client = operator_client()
    if run and not as_json:
        _tell_story(client, query, folds=not every, follow=follow)
        return
    for raw, event in _lines(client, "/v1/events", query, Event, follow=follow):
        print_line(raw if as_json else views.event_text(event))


def _tell_story(client: "HubClient", query: dict[str, object], *, folds: bool, follow: bool) -> None:
    """What has happened, folded; then with `follow` each event as it comes."""
    from ciuic.cli.story import STORY_INDENT, story_line, story_lines
    from ciuic.net.messages import Event

    first: list[float] = []

    def told() -> Iterator["Event"]:
        for _, event in _lines(client, "/v1/events", query, Event, follow=False):
            first[:] = first or [event.time]
            yield event

    for line in story_lines(told(), folds=folds):
        print_hanging(line, STORY_INDENT)
    if not first:
        print_note("nothing has happened in this run; `ciuic ps` lists the runs")
    if follow:
        for _, event in _lines(client, "/v1/events", query, Event, follow=True):
            first[:] = first or [event.time]
            print_hanging(story_line(event.time - first[0], event.kind, event.text), STORY_INDENT)


def _lines(
    client: "HubClient", path: str, query: dict[str, object], kind: type[T], *, follow: bool
) -> Iterator[tuple[str, T]]:
    """Lines as text and as records. With `follow`, a broken connection is taken up where it ended."""
    from ciuic.net.messages import decode

    while True:
        given = {key: value for key, value in query.items() if value not in ("", [])}
        try:
            for raw in client.stream_lines(f"{path}?{urlencode({**given, 'follow': int(follow)}, doseq=True)}"):
                record = decode(raw, kind)
                yield raw.decode(), record
                query["after"] = record.id
            if not follow:
                return
        except UnreachableError as error:
            if not follow:
                raise
            print_note(f"{error.message}; still trying")
        time.sleep(RECONNECT_S)

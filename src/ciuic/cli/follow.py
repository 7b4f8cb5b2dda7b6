"""Commands that read the hub's streams: logs and events."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar
from urllib.parse import urlencode

import typer

from ciuic.cli.output import JsonOption, print_line, print_note
from ciuic.cli.profile import operator_client
from ciuic.cli.runs import OptionalRun, newest_run, run_path
from ciuic.errors import UnreachableError

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
    run: Annotated[str, typer.Option(help="Only events of this run.")] = "",
    after: AfterOption = 0,
    follow: FollowOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the story of the network.

    With --json one JSON object per line.
    """
    from ciuic.cli import views
    from ciuic.net.messages import Event

    for raw, event in _lines(operator_client(), "/v1/events", {"run": run, "after": after}, Event, follow=follow):
        print_line(raw if as_json else views.event_text(event))


def _lines(
    client: "HubClient", path: str, query: dict[str, object], kind: type[T], *, follow: bool
) -> Iterator[tuple[str, T]]:
    """Lines as text and as records. With `follow`, a broken connection is taken up where it ended."""
    from ciuic.net.messages import decode

    while True:
        given = {key: value for key, value in query.items() if value != ""}
        try:
            for raw in client.stream_lines(f"{path}?{urlencode({**given, 'follow': int(follow)})}"):
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
